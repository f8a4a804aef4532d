"""Plain output of ranks and launchers: its ends, exits, and whether a library gave up waiting.

`log_lines` knows the rank of each line, `log_reports` what libraries say there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from moediag.evidence import tracebacks
from moediag.evidence.model import ExitStatus, RankError
from moediag.evidence.signal_names import status_of
from moediag.evidence.tracebacks import BEGINS
from moediag.protocol import open_stored

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024
# Between them, lines with these words are looked for, and what follows each is read.
_TELLING = (
    b"Traceback (most recent call last)", b"out of memory", b"Out Of Memory", b"OOMKilled",
    b"Killed process", b"srun: error", b"exited on signal", b"NVRM: Xid", b"by GPU node",
    b"Watchdog caught", b"failed (exitcode", b"MPI_ABORT", b"terminated with",
    b"job killed", b"cli.launcher",
)  # fmt: skip
_SCANNED = 256 * 1024 * 1024  # bytes before the end
_CHUNK = 4 * 1024 * 1024
_EXCERPT = 8 * 1024
_EXCERPTS = 64

# The table that torchrun prints at its end, one block per rank, the root cause last.
_ROW = re.compile(
    r"^[ \t]*rank[ \t]*: (?P<rank>\d{1,6}) \(local_rank: \d+\)[ \t\r]*\n"
    r"[ \t]*exitcode[ \t]*: (?P<code>-?\d{1,9}) \(pid: \d+\)",
    re.MULTILINE,
)
_TRACEBACK = re.compile(rf"^[ \t]*traceback[ \t]*: {re.escape(BEGINS)}[ \t\r]*\n", re.MULTILINE)
_BLOCK_ENDS = re.compile(r"^(?:[-=]{20,}|\[\d{1,6}\]:)[ \t\r]*$")
_ROOT = "Root Cause (first observed failure)"
_SUMMARY = "ChildFailedError"
_TIMEOUT = re.compile(
    r"watchdog caught collective operation timeout|timed? ?out (?:waiting|after)|"
    r"(?:collective|recv|send|wait)[^\n]{0,100} timed? ?out",
    re.IGNORECASE,
)
_LIBRARY = re.compile(
    r"Dist\w*Error'?$|gloo|nccl|hccl|ccl:|\bUCX\b|Socket Timeout|mismatch between collectives", re.I
)
# Signs that a launcher of torch runs between the scheduler's tasks and the ranks.
_ELASTIC = re.compile(
    r"torch[./]distributed[./](?:elastic|run)|torchrun|\[default\d|ChildFailedError"
)
# The number of a task before the mark of a rank.
_NUMBERED = re.compile(
    r"^(?: {0,6}(\d{1,7}): |\[\d+,(\d{1,7})\]<std(?:out|err)>: ?).{0,120}?\[rank(\d{1,7})[\[\]]",
    re.MULTILINE,
)


def ends(path: Path) -> str:
    """The beginning and the end of a file of any size, and between them what follows a line about
    a failure. Raises OSError."""
    with open_stored(path) as file:
        head = file.read(HEAD_BYTES)
        size = file.seek(0, 2)
        if size <= HEAD_BYTES + TAIL_BYTES:
            file.seek(HEAD_BYTES)
            raw = head + file.read(TAIL_BYTES)
        else:
            # Neither half of a line belongs to the other.
            start = max(HEAD_BYTES, size - TAIL_BYTES - _SCANNED)
            told = _failures_told(file, start, size - TAIL_BYTES)
            file.seek(size - TAIL_BYTES)
            pieces = (head.rpartition(b"\n")[0], *told, file.read(TAIL_BYTES).partition(b"\n")[2])
            raw = b"\n".join(pieces)
    return raw.decode("utf-8", errors="replace")


def _failures_told(file: BinaryIO, start: int, end: int) -> list[bytes]:
    """Excerpts of a file between two places, each from a line with one of `_TELLING` on."""
    found: list[bytes] = []
    file.seek(start)
    while file.tell() < end and len(found) < _EXCERPTS:
        chunk = file.read(min(_CHUNK, end - file.tell())) + file.readline(_EXCERPT)
        hits = sorted(at for word in _TELLING for at in _places(chunk, word))
        read = 0
        for at in hits:
            if at >= read and len(found) < _EXCERPTS:
                begin = chunk.rfind(b"\n", 0, at) + 1
                read = chunk.find(b"\n", begin + _EXCERPT)
                read = len(chunk) if read < 0 else read
                found.append(chunk[begin:read])
    return found


def _places(chunk: bytes, word: bytes) -> Iterator[int]:
    at = chunk.find(word)
    while at >= 0:
        yield at
        at = chunk.find(word, at + _EXCERPT)


def torchrun_summary(text: str) -> tuple[dict[int, ExitStatus], tuple[int, ...]]:
    """(how ranks ended, the rank that failed first) from the launcher's summary.

    A SIGTERM came from the launcher.
    """
    at = _summary_at(text)
    if at < 0:
        return {}, ()
    first: tuple[int, ...] = ()
    found = {}
    root = text.find(_ROOT, at)
    for row in _ROW.finditer(text, at):
        rank, end = int(row["rank"]), status_of(int(row["code"]))
        found[rank] = replace(end, by_us=end.signal == "SIGTERM")
        if 0 <= root < row.start() and not first:
            first = (rank,)
    return found, first


def _summary_at(text: str) -> int:
    """Where the launcher's last summary begins; people also paste it without its first lines."""
    at = text.rfind(_SUMMARY)
    return 0 if at < 0 and _ROOT in text else at


def tasks_are_ranks(text: str) -> bool:
    """Whether the numbers that a scheduler gives its tasks are those of ranks, unless nothing shows
    it: with one task per node they are not."""
    if _ELASTIC.search(text):
        return False
    return all((task or rank) == own for task, rank, own in _NUMBERED.findall(text))


def summary_errors(text: str) -> dict[int, RankError]:
    """The exceptions in the launcher's summary, by rank: the `traceback` of each block
    (torch/distributed/elastic/multiprocessing/errors, `_FAILURE_FORMAT_TEMPLATE`)."""
    at = _summary_at(text)
    if at < 0:
        return {}
    rows = list(_ROW.finditer(text, at))
    found = {}
    for row, end in zip(rows, [*(row.start() for row in rows[1:]), len(text)], strict=False):
        begins = _TRACEBACK.search(text, row.end(), end)
        if begins is None:
            continue
        lines = [BEGINS]
        for line in text[begins.end() : end].splitlines():
            if _BLOCK_ENDS.match(line):
                break
            lines.append(line[2:] if line.startswith("  ") else line)
        if error := tracebacks.error_at(lines, 0):
            found[int(row["rank"])] = replace(error, frames=())
    return found


def gave_up_waiting(error: RankError) -> bool:
    """Whether the library's timeout ended a hang; then the error is not a failure of this rank."""
    return bool(_TIMEOUT.search(error.message))


def of_a_library(error: RankError) -> bool:
    """Whether a communication library raised it."""
    return bool(_LIBRARY.search(error.type) or _LIBRARY.search(error.message))


def ended_a_wait(error: RankError) -> bool:
    """Whether a wait for other ranks may end with it: a library or a synchronization with the
    device raised it."""
    return of_a_library(error) or "synchronize" in error.message.lower()


def is_log(text: str) -> bool:
    """Whether text is about a run, unlike a README in the folder."""
    return bool(
        re.search(
            r"Traceback \(most recent|terminate called|ProcessGroup|torch\.distributed|\bNCCL\b|"
            r"\bstep\b|\bloss\b|\bepoch\b|\[[EWIF]\d{4} |ERROR|WARNING|INFO",
            text,
        )
    )
