"""Text files with stacks of one process or of several: what wrote them, and whose each stack is."""

from __future__ import annotations

import re
from collections.abc import Callable

from moediag.evidence import log_lines, rank_stacks
from moediag.evidence.model import Frame, Stack
from moediag.records import dataclass

# A line of its own that names a rank: `Rank 3`, `=== rank 3 ===`, `# rank1 (node0), py-spy`.
_TITLE = re.compile(
    r"^[\W_]{0,12}(?:[Gg]lobal[ _])?(?i:rank)[\s_:#=-]{0,3}(?P<rank>\d{1,7})\b[^\n]{0,60}$"
)
# py-spy's header, or a separator of a script: `===== node-0 PID 42 =====`.
_PROCESS = re.compile(r"^(?:Process |[=#*-]{2,}.{0,60}?\b[Pp][Ii][Dd][ :=]{1,3})(?P<pid>\d+)\b")
_MAIN = re.compile(r'^Thread \S+ \([^)]*\): "MainThread"')  # one of each process
_SPY = re.compile(r"^Thread \S+ \((?:idle|active|waiting)[^)\n]*\)(?:: |$)", re.MULTILINE)
_INSIDE = re.compile(
    r"Thread \S+ \((?:idle|active|waiting)|Traceback for thread \d|#\d+ +0x[0-9a-f]+ in "
)
# `#4  0x00007f11 in c10d::f (this=0x1) at /src/x.cpp:7`, `#5 … from /lib/libc.so.6`
_GDB = re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(?P<function>\S[^(\n]*?) ?\(", re.MULTILINE)
_GDB_PLACE = re.compile(r"\) (?:at (?P<file>\S+?):(?P<line>\d{1,9})|from (?P<library>\S+))\s*$")
_GDB_PYTHON = re.compile(
    r", for file (?P<file>\S+?), line (?P<line>\d{1,9}), in (?P<function>\S+) \("
)
_GDB_THREAD = re.compile(r"^Thread (?P<id>\d+) \((?:Thread 0x|LWP )")
# Threads that wait in NCCL or c10d in every process, whatever the program does.
_HELPER = re.compile(r"[wW]atchdog|[hH]eartbeat|ncclProxy|HookLoop|TCPStore|listenLoop")
_LONGEST = 4096  # characters of one frame
_PY_BT = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S+)')


@dataclass(frozen=True, slots=True)
class Section:
    """The stacks of one process in a file."""

    #: The rank that the file says; None if it does not.
    rank: int | None
    #: "process 7114", or "".
    process: str
    #: Empty if the text ends before the process's first frame.
    stacks: tuple[Stack, ...]


def read(text: str) -> tuple[Section, ...]:
    """The stacks in a text by process; () if no tool for stacks wrote it. faulthandler's are not
    looked for: they stand between the lines of a log."""
    found = _sections(text)
    if found or not _INSIDE.search(text):
        return found
    # Something was put before each line: a container's name, a rank.
    parts: dict[tuple[int | None, str], list[str]] = {}
    for line in log_lines.read(text):
        rank = None if line.local else line.rank
        parts.setdefault((rank, line.process), []).append(line.text)
    return tuple(
        Section(rank if one.rank is None else one.rank, one.process or process, one.stacks)
        for (rank, process), lines in parts.items()
        for one in _sections("\n".join(lines))
    )


def _sections(text: str) -> tuple[Section, ...]:
    parse = _parser(text)
    if parse is None:
        return ()
    found = []
    rank: int | None = None
    process = ""
    lines: list[str] = []
    mains = 0

    def close() -> None:
        nonlocal mains
        mains = 0
        stacks = tuple(stack for stack in parse("\n".join(lines)) if stack.frames)
        if stacks or process:
            found.append(Section(rank, process, stacks))
        lines.clear()

    for line in text.splitlines():
        line = line.removeprefix("> ")
        if title := _TITLE.match(line):
            close()
            rank, process = int(title["rank"]), ""
        elif header := _PROCESS.match(line):
            if mains:
                close()
                rank = None
            process = f"process {header['pid']}"
        elif _MAIN.match(line):
            if mains:
                close()
                rank, process = None, ""
            mains += 1
        lines.append(line)
    close()
    return tuple(found)


def _parser(text: str) -> Callable[[str], tuple[Stack, ...]] | None:
    if re.search(r"^[ \t]*Traceback for thread \d+", text, re.MULTILINE):
        return rank_stacks.parse_pystack
    if _SPY.search(text) and rank_stacks.parse_pyspy_text(text):
        return rank_stacks.parse_pyspy_text
    if re.search(r"^#\d+ +0x[0-9a-f]+ in \S", text, re.MULTILINE):
        return parse_gdb
    return None


def parse_gdb(text: str) -> tuple[Stack, ...]:
    """``bt`` or ``thread apply all bt``, and what ``py-bt`` printed between."""
    stacks: list[Stack] = []
    thread = "thread 1"
    frames: list[Frame] = []

    def close() -> None:
        if frames and not any(_HELPER.search(frame.function) for frame in frames):
            stacks.append(Stack(thread, "gdb", tuple(frames)))
        frames.clear()

    for line in _entries(text):
        if header := _GDB_THREAD.match(line):
            close()
            thread = f"thread {header['id']}"
        elif python := _GDB_PYTHON.search(line) or _PY_BT.match(line):
            frames.append(Frame(python["file"], int(python["line"]), python["function"]))
        elif native := _GDB.match(line):
            if line.startswith("#0 "):
                close()
            place = _GDB_PLACE.search(line)
            file = (place["file"] or place["library"]) if place is not None else ""
            at = int(place["line"] or 0) if place is not None else 0
            frames.append(Frame(file, at, native["function"], native=True))
    close()
    return tuple(stacks)


def _entries(text: str) -> list[str]:
    """Lines, with gdb's indented second halves joined to the first."""
    found: list[str] = []
    for line in text.splitlines():
        open_ = found and found[-1].startswith("#") and len(found[-1]) < _LONGEST
        if open_ and re.match(r" {3,}(?:from|at) \S", line):
            found[-1] = f"{found[-1]} {line.strip()}"
        else:
            found.append(line)
    return found
