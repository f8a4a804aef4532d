"""How the ranks ended: torch elastic's error files, tracebacks in their output.

A rank that dies by a signal leaves no exception, one that raises leaves it in up to three places
(recorder, error file, output); the readers here give the same `RankError` for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag.evidence.model import Frame, RankError
from moediag.protocol import innermost_user, open_stored, read_json

LAST_LINES = 20
_TAIL_BYTES = 256 * 1024  # an endless log is read from its end

_BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S+)\s*$')
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_WRAPPED = re.compile(
    rf"^Caught \S+ (?P<where>in [^\n]+)\.\nOriginal {re.escape(_BEGINS)}\n(?P<traceback>.*)", re.S
)
_WHAT = re.compile(r"^terminate called after throwing an instance of '(?P<type>[^']+)'")


def read_error_file(path: Path, libraries: Sequence[str] = ()) -> RankError | None:
    """The error in torch elastic's error file, or None.

    The file is ``{"message": {"message": "Type: text", "extraInfo": {"py_callstack": …,
    "timestamp": …}}}``, or the flat form of older releases. ``libraries`` are the library folders
    that the rank recorded.
    """
    try:
        raw = read_json(path, "replace")
    except (OSError, ValueError):
        return None
    return elastic_error(raw, libraries)


def elastic_error(raw: Any, libraries: Sequence[str] = ()) -> RankError | None:
    """The same from parsed JSON; None if it is not an error file."""
    message = raw.get("message") if isinstance(raw, dict) else None
    extra: Mapping[str, Any] = {}
    if isinstance(message, dict):
        extra = _mapping(message.get("extraInfo"))
        message = message.get("message")
    if not isinstance(message, str) or not message:
        return None
    kind, _, text = message.partition(": ")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        kind, text = "Exception", message
    callstack = extra.get("py_callstack")
    callstack = callstack if isinstance(callstack, str) else ""
    # An exception's own traceback is the last one; those before are what it was raised from.
    *before, own = callstack.split(_BEGINS)
    where = user_frame(own, libraries)
    first = _traceback(before[1].splitlines(), libraries) if len(before) > 1 else None
    error = RankError(
        short_type(kind), text, where, _time(extra.get("timestamp")), _frames(own),
        f"{first.type}: {first.message} at {first.where}" if first is not None else "",
    )  # fmt: skip
    return unwrapped(error, libraries)


def unwrapped(error: RankError, libraries: Sequence[str] = ()) -> RankError:
    """The exception of a data loader's worker, if ``error`` is what torch raised in its place
    (``torch._utils.ExceptionWrapper``); else ``error``."""
    wrapped = _WRAPPED.match(error.message)
    if wrapped is None:
        return error
    last = wrapped["traceback"].rpartition(_BEGINS)[2]  # of a chain
    first = _traceback(last.splitlines(), libraries)
    if first is None:
        return error
    message = f"{first.message} ({wrapped['where']})".lstrip()
    return replace(error, type=first.type, message=message, where=first.where, after="")


def _frames(traceback: str) -> tuple[Frame, ...]:
    """The frames of one traceback, innermost first."""
    found = [frame for line in traceback.splitlines() if (frame := _FRAME.match(line))]
    return tuple(Frame(f["file"], int(f["line"]), f["function"]) for f in reversed(found))


def error_in_output(text: str, libraries: Sequence[str] = ()) -> RankError | None:
    """The last Python traceback or the last uncaught C++ exception, or None."""
    lines = text.splitlines()
    for at in range(len(lines) - 1, -1, -1):
        line = _unprefixed(lines[at])
        if line.startswith(_BEGINS):
            found = _traceback(lines[at + 1 :], libraries)
            if found is not None:
                return found
        elif what := _WHAT.match(line):
            following = _unprefixed(lines[at + 1]).strip() if at + 1 < len(lines) else ""
            return RankError(what["type"], following.removeprefix("what():").strip())
    return _cut_traceback(lines, libraries)


def _cut_traceback(lines: list[str], libraries: Sequence[str]) -> RankError | None:
    """The error of a traceback whose first line is missing: people paste the end of a log. The
    exception follows its frames at once; other lines that look like one are messages."""
    plain = [_unprefixed(line) for line in lines]
    frames = [at for at, line in enumerate(plain) if _FRAME.match(line)]
    if not frames:
        return None
    after = next((line for line in plain[frames[-1] + 1 :] if line[:1].strip()), "")
    last = _LAST.match(after)
    if last is None or not last["type"].endswith(("Error", "Exception")):
        return None
    return _traceback(plain[frames[0] :], libraries)


def _traceback(lines: list[str], libraries: Sequence[str]) -> RankError | None:
    for at, prefixed in enumerate(lines):
        line = _unprefixed(prefixed)
        if line.startswith(_BEGINS):  # another one: this one was cut
            return None
        if not line.startswith(" ") and (last := _LAST.match(line)):
            frames = "\n".join(_unprefixed(earlier) for earlier in lines[:at])
            message = last["message"] or ""
            if message.startswith("Caught ") and _WRAPPED.match(
                whole := "\n".join([message, *map(_unprefixed, lines[at + 1 :])])
            ):
                message = whole
            found = RankError(short_type(last["type"]), message, user_frame(frames, libraries))
            return unwrapped(found, libraries)
    return None


def _unprefixed(line: str) -> str:
    """The line without torchrun's prefix, ``[rank1]: `` or ``[default1]:``."""
    return re.sub(r"^\[(?:rank|default)\d+\]: ?", "", line)


def user_frame(traceback: str, libraries: Sequence[str] = ()) -> str:
    """The innermost frame of user code as ``file.py:12 function``.

    Without user code it is the innermost frame of all; without frames, "".
    """
    frames = [frame for line in traceback.splitlines() if (frame := _FRAME.match(line))][::-1]
    if not frames:
        return ""
    frame = frames[innermost_user([f["file"] for f in frames], libraries) or 0]
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']} {frame['function']}"


def short_type(name: str) -> str:
    """``torch.distributed.DistBackendError`` -> ``DistBackendError``; C++ names stay whole."""
    return name if "::" in name else name.rpartition(".")[2]


def tail(path: Path) -> str:
    """The end of a rank's output; empty when there is none."""
    try:
        with open_stored(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.strip())[-LAST_LINES:]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _time(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
