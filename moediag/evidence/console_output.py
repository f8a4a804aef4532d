"""Plain output of ranks and launchers: its ends, exits, and whether a library gave up waiting.

`log_lines` knows the rank of each line, `log_reports` what libraries say there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from moediag.evidence import tracebacks
from moediag.evidence.model import ExitStatus, RankError
from moediag.evidence.tracebacks import BEGINS
from moediag.protocol import open_stored

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024

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
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS",
            8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}  # fmt: skip


def ends(path: Path) -> str:
    """The beginning and the end of a file of any size. Raises OSError."""
    with open_stored(path) as file:
        head = file.read(HEAD_BYTES)
        size = file.seek(0, 2)
        if size <= HEAD_BYTES + TAIL_BYTES:
            file.seek(HEAD_BYTES)
            raw = head + file.read(TAIL_BYTES)
        else:
            file.seek(size - TAIL_BYTES)
            # Neither half of a line belongs to the other.
            raw = head.rpartition(b"\n")[0] + b"\n" + file.read(TAIL_BYTES).partition(b"\n")[2]
    return raw.decode("utf-8", errors="replace")


def torchrun_summary(text: str) -> tuple[dict[int, ExitStatus], tuple[int, ...]]:
    """(how ranks ended, the rank that failed first) from the launcher's summary.

    A SIGTERM came from the launcher.
    """
    at = text.rfind(_SUMMARY)
    if at < 0:
        return {}, ()
    first: tuple[int, ...] = ()
    found = {}
    root = text.find(_ROOT, at)
    for row in _ROW.finditer(text, at):
        rank, code = int(row["rank"]), int(row["code"])
        signal = (_SIGNALS.get(-code) or f"signal {-code}") if code < 0 else None
        found[rank] = ExitStatus(None if signal else code, signal, by_us=signal == "SIGTERM")
        if 0 <= root < row.start() and not first:
            first = (rank,)
    return found, first


def summary_errors(text: str) -> dict[int, RankError]:
    """The exceptions in the launcher's summary, by rank: the `traceback` of each block
    (torch/distributed/elastic/multiprocessing/errors, `_FAILURE_FORMAT_TEMPLATE`)."""
    at = text.rfind(_SUMMARY)
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


def of_backend(error: RankError) -> bool:
    """Whether a communication backend raised it: torch's own error, or that of torch_npu."""
    return error.type.endswith("DistBackendError") or bool(re.search("[Hh]ccl", error.message))


def is_log(text: str) -> bool:
    """Whether text is about a run, unlike a README in the folder."""
    return bool(
        re.search(
            r"Traceback \(most recent|terminate called|ProcessGroup|torch\.distributed|\bNCCL\b|"
            r"\bstep\b|\bloss\b|\bepoch\b|\[[EWIF]\d{4} |ERROR|WARNING|INFO",
            text,
        )
    )
