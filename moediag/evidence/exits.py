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

from moediag.evidence import tracebacks
from moediag.evidence.model import RankError
from moediag.evidence.tracebacks import BEGINS, short_type
from moediag.protocol import open_stored, read_json

LAST_LINES = 20
_TAIL_BYTES = 256 * 1024  # an endless log is read from its end

_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|loss)\b[ =:\[]{1,3}\d|\btraining (?:finished|complete)|\dit/s",
    re.IGNORECASE,
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
    # An exception's own traceback is the last one outside its message; those before are what it
    # was raised from.
    outside, _, _ = callstack.partition(text) if BEGINS in text else (callstack, "", "")
    *before, own = outside.split(BEGINS)
    group = tracebacks.group_in(callstack, libraries)
    first = tracebacks.traceback(before[1].splitlines(), libraries) if len(before) > 1 else None
    error = RankError(
        short_type(kind), text, tracebacks.user_frame(own, libraries),
        _time(extra.get("timestamp")), tracebacks.frames_in(own),
        f"{first.type}: {first.message} at {first.where}" if first is not None else "",
    )  # fmt: skip
    if group is not None:
        member = first is not None and f"{first.type} at {first.where}" in group.message
        after = "" if member else error.after
        return replace(error, message=group.message, where=group.where, after=after)
    found = tracebacks.unwrapped(error, libraries)
    if found is not error:
        return found
    noted = "; ".join(tracebacks.notes(own.splitlines(), text))
    error = replace(error, message=f"{text} ({noted})") if noted else error
    return tracebacks.remote(error, BEGINS.join(before), libraries)


def error_in_output(text: str, libraries: Sequence[str] = ()) -> RankError | None:
    """The last Python traceback or the last uncaught C++ exception, or None."""
    lines = [tracebacks.unprefixed(line) for line in text.splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        if found := tracebacks.error_at(lines, at, libraries):
            return replace(found, frames=())
        if what := _WHAT.match(lines[at]):
            following = lines[at + 1].strip() if at + 1 < len(lines) else ""
            return RankError(what["type"], following.removeprefix("what():").strip())
    return _cut_traceback(lines, libraries)


def error_in_excerpt(text: str) -> RankError | None:
    """The same from an excerpt, in which the traceback may be missing: people paste its last line.
    What a program prints behind such a line shows that it went on."""
    found = error_in_output(text)
    if found is not None or BEGINS in text:
        return found
    lines = [tracebacks.unprefixed(line) for line in text.splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        kind, _, message = lines[at].partition(": ")
        if message and tracebacks.is_error(lines[at]):
            return RankError(short_type(kind), tracebacks.continued(message, lines[at + 1 :]))
        if _PROGRESS.search(lines[at]):
            return None
    return None


def went_on(text: str) -> bool:
    """Whether a program printed progress more than once behind the first lines of ``text``."""
    return len(_PROGRESS.findall(text)) > 1


def goes_on(text: str) -> bool:
    """Whether a program printed progress behind its last traceback."""
    return bool(_PROGRESS.search(text.rpartition(BEGINS)[2]))


def _cut_traceback(lines: list[str], libraries: Sequence[str]) -> RankError | None:
    """The error of a traceback whose first line is missing: people paste the end of a log. The
    exception follows its frames at once; other lines that look like one are messages."""
    frames = [at for at, line in enumerate(lines) if tracebacks.is_frame(line)]
    if not frames:
        return None
    after = next((line for line in lines[frames[-1] + 1 :] if line[:1].strip()), "")
    if not tracebacks.is_error(after):
        return None
    found = tracebacks.traceback(lines[frames[0] :], libraries)
    return None if found is None else replace(found, frames=())


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
