"""Python's tracebacks in text, and the errors inside them: those of another process or rank, and
the members of a group.

An exception that crosses a process arrives as text: `torch.utils.data` (``Caught … in DataLoader
worker``), `torch.multiprocessing.spawn` (``-- Process 0 terminated …``), distributed checkpoints
(``CheckpointException``, one traceback a rank), Ray (``ray::train() (pid=7)``), and the pools of
multiprocessing, concurrent.futures and joblib (``RemoteTraceback``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from moediag.evidence.model import Frame, RankError
from moediag.evidence.rank_stacks import of_user

BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S+)\s*$')
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:\([\w.]+\))?(?:: (?P<message>.*))?$")
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")  # torchrun's and torch's, before each line
_WRAPPED = re.compile(
    rf"^Caught \S+ (?P<where>in [^\n]+)\.\nOriginal {re.escape(BEGINS)}\n(?P<traceback>.*)", re.S
)
# The head of a traceback that is part of a message, and whose it is.
_PROCESS = re.compile(r"-- Process (\d{1,9}) terminated with the following error:\s*$")
_HEAD = re.compile(
    rf"(?:-- Process (?P<process>\d{{1,9}}) terminated with the following error:\n+)?"
    rf"{re.escape(BEGINS)}(?: \(RANK (?P<rank>\d{{1,9}})\))?\n"
    r"|(?:\x1b\[\d+m)?(?P<task>ray::[^\s(]{1,200})[^\n]{0,20} \([^\n]{0,400}\)\n"
)
_REMOTE = re.compile(
    rf'RemoteTraceback: ?\n"""\n{re.escape(BEGINS)}\n(?P<traceback>(?:(?!\n""").)*)\n"""\s+'
    r"The above exception was the direct cause of the following exception:\s*$",
    re.S,
)
_GROUP = re.compile(r"^\s*\+ Exception Group Traceback \(most recent call last\):")
_MEMBER = re.compile(r"^\s*\+[-+]*-{4,} (?:\d{1,9}|\.\.\.) -{4,}$")
_MOST_MEMBERS = 4
_MOST_CONTINUED = 6  # lines of a message that are told
_OF_NCCL = re.compile(r"nccl[A-Z]\w+: |Last error:|Cuda failure ")  # below a DistBackendError


def error_at(lines: Sequence[str], at: int, libraries: Sequence[str] = ()) -> RankError | None:
    """The error of the traceback or the group whose first line is ``lines[at]``, without torchrun's
    prefixes; None for any other line, or if it was cut."""
    if _GROUP.match(lines[at]):
        return _group(lines[at + 1 :], libraries)
    if not lines[at].startswith(BEGINS):
        return None
    outer = _outside(lines, at)
    found = traceback(lines[outer + 1 :], libraries)
    if found is None and outer != at:
        found = traceback(lines[at + 1 :], libraries)
    remote = _REMOTE.search("\n".join(lines[max(0, outer - 200) : outer]))
    return found if found is None or remote is None else _from_remote(found, remote, libraries)


def _outside(lines: Sequence[str], at: int) -> int:
    """The first line of the traceback whose exception has the traceback at ``at`` in its message;
    else ``at``."""
    while "(RANK " in lines[at] or any(
        _PROCESS.search(line) for line in lines[max(0, at - 1) : at]
    ):
        before = (n for n in range(at - 1, -1, -1) if lines[n].startswith(BEGINS))
        above = next(before, None)
        if above is None:
            return at
        at = above
    return at


def traceback(lines: Sequence[str], libraries: Sequence[str] = ()) -> RankError | None:
    """The error of the first traceback, whose lines follow its head; None if it was cut."""
    for at, line in enumerate(lines):
        if line.startswith(BEGINS):  # another one: this one was cut
            return None
        if not line.startswith(" ") and (last := _LAST.match(line)):
            frames = "\n".join(lines[:at])
            message, rest = last["message"] or "", "\n".join(lines[at + 1 :])
            whole = f"{message}\n{rest}"
            if _WRAPPED.match(whole) or (_HEAD.search(whole) and _opens(message, lines[at + 1 :])):
                message = whole
            else:
                message = continued(message, lines[at + 1 :])
            where = user_frame(frames, libraries)
            found = RankError(short_type(last["type"]), message, where, frames=frames_in(frames))
            return unwrapped(found, libraries)
    return None


def _opens(message: str, following: Sequence[str]) -> bool:
    """Whether the text of another process follows the first line of a message at once."""
    first = next((line for line in (message, *following) if line.strip()), "")
    head = message.startswith("CheckpointException ranks:")
    return head or bool(_PROCESS.search(first)) or "ray::" in first


def continued(message: str, following: Sequence[str]) -> str:
    """A message with its lines after the first one: a list below a colon, Ray's of an actor, NCCL's
    last error."""
    nccl = bool(following) and _OF_NCCL.match(following[0])
    if not nccl and not message.endswith((":", "finishing this task.")):
        return message
    found = [message]
    for line in following[:_MOST_CONTINUED]:
        if not line.startswith((" ", "\t", "/")) and not _OF_NCCL.match(line):
            break
        found.append(line.strip())
    return " ".join(found)


def unwrapped(error: RankError, libraries: Sequence[str] = ()) -> RankError:
    """The error of another process or rank, if its text is the message of ``error``; else
    ``error``. Its place is the line that called the library where no line of the user is inside."""
    wrapped = _WRAPPED.match(error.message)
    if wrapped is not None:
        inside, whose = wrapped["traceback"].rpartition(BEGINS)[2], wrapped["where"]
    else:
        heads = list(_HEAD.finditer(error.message))
        if not heads:
            return error
        inside, whose = error.message[heads[-1].end() :], _whose(heads)
    first = traceback(inside.splitlines(), libraries)
    if first is None:
        return error
    own = bool(of_user(first.frames, libraries))
    return replace(
        error,
        type=first.type,
        message=f"{first.message.removesuffix('.')} ({whose})".lstrip() if whose else first.message,
        where=first.where if own or not error.where else error.where,
        frames=first.frames if own else error.frames,
        after="",
    )


def _whose(heads: Sequence[re.Match[str]]) -> str:
    """Which process or rank raised the last error in a message."""
    for head in reversed(heads):
        if head["task"]:
            return f"in {head['task']}"
        if head["process"]:
            return f"in process {head['process']}"
        if head["rank"]:
            return f"on rank {head['rank']}" + (", and others" if len(heads) > 1 else "")
    return ""


def remote(error: RankError, before: str, libraries: Sequence[str] = ()) -> RankError:
    """``error`` with the place in the process of a pool that raised it, if the text before its own
    traceback tells it."""
    found = _REMOTE.search(before)
    return error if found is None else _from_remote(error, found, libraries)


def _from_remote(error: RankError, found: re.Match[str], libraries: Sequence[str]) -> RankError:
    last = found["traceback"].rpartition(BEGINS)[2]  # of a chain
    inside = traceback(last.splitlines(), libraries)
    if inside is None or inside.type != error.type:
        return error
    return replace(error, where=inside.where, after="")


def group_in(text: str, libraries: Sequence[str] = ()) -> RankError | None:
    """The last group of exceptions that a text shows, or None."""
    lines = text.splitlines()
    heads = [at for at, line in enumerate(lines) if _GROUP.match(line)]
    return _group(lines[heads[-1] + 1 :], libraries) if heads else None


def _group(lines: Sequence[str], libraries: Sequence[str]) -> RankError | None:
    """A group of exceptions, with its first members in its message."""
    parts: list[list[str]] = [[]]
    margin = 0
    for line in lines:
        if _MEMBER.match(line):
            depth = len(line) - len(line.lstrip())
            margin = margin or depth
            if depth <= margin + 2:  # not of a group inside this one
                parts.append([])
                continue
        text = line.lstrip()
        if not text.startswith(("|", "+")):
            break
        parts[-1].append(text[1:].removeprefix(" "))
    own = traceback(parts[0], libraries)
    if own is None:
        return None
    members = [text for part in parts[1:] if (text := _member(part, libraries))]
    more = len(members) - _MOST_MEMBERS
    told = "; ".join(members[:_MOST_MEMBERS]) + (f"; and {more} more" if more > 0 else "")
    return replace(own, message=f"{own.message}: {told}" if told else own.message)


def _member(lines: Sequence[str], libraries: Sequence[str]) -> str:
    begins = bool(lines) and lines[0].startswith(BEGINS)
    found = traceback(lines[1:] if begins else lines, libraries)
    if found is None:
        return ""
    text = f"{found.type} at {found.where}" if found.where else found.type
    return f"{text}: {found.message}" if found.message else text


def notes(traceback_lines: Sequence[str], message: str) -> tuple[str, ...]:
    """What `BaseException.add_note` added: the lines of a whole traceback after its message."""
    for at, line in enumerate(traceback_lines):
        if not line.startswith(" ") and _LAST.match(line):
            after = at + max(1, len(message.splitlines()))
            return tuple(note for note in traceback_lines[after:] if note.strip())
    return ()


def frames_in(text: str) -> tuple[Frame, ...]:
    """The frames of one traceback, innermost first."""
    found = [frame for line in text.splitlines() if (frame := _FRAME.match(line))]
    return tuple(Frame(f["file"], int(f["line"]), f["function"]) for f in reversed(found))


def is_frame(line: str) -> bool:
    return _FRAME.match(line) is not None


def is_error(line: str) -> bool:
    """Whether a line is the last one of a traceback: others that look like it are messages."""
    last = _LAST.match(line)
    named = last is not None and last["type"].endswith(("Error", "Exception"))
    return named and not _OF_NCCL.match(line)


def unprefixed(line: str) -> str:
    """The line without ``[rank1]: `` or ``[default1]:``."""
    return _PREFIX.sub("", line)


def user_frame(text: str, libraries: Sequence[str] = ()) -> str:
    """The innermost frame of user code in a traceback as ``file.py:12 function``.

    Without user code it is the innermost frame of all; without frames, "".
    """
    frames = frames_in(text)
    return next((frame.place for frame in (*of_user(frames, libraries), *frames)), "")


def short_type(name: str) -> str:
    """``torch.distributed.DistBackendError`` -> ``DistBackendError``; C++ names stay whole."""
    return name if "::" in name else name.rpartition(".")[2]
