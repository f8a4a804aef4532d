"""Plain output of ranks and launchers: the rank of each line, exits, and timeouts of watchdogs.

A file may hold one rank's output, many ranks' lines with a prefix each (torchrun's ``[default1]:``,
torch's ``[rank1]:``, or both), or the launcher's own output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moediag.evidence.flight_names import plain_op
from moediag.evidence.model import Collective, ExitStatus, RankError

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024

_PREFIX = re.compile(r"^\s*\[(?P<kind>rank|default)(?P<number>\d{1,6})\]: ?")
# The table that torchrun prints at its end, one block per rank, the root cause last.
_ROW = re.compile(
    r"^\s*rank\s*: (?P<rank>\d{1,6}) \(local_rank: \d+\)\s*\n"
    r"\s*exitcode\s*: (?P<code>-?\d{1,9}) \(pid: \d+\)",
    re.MULTILINE,
)
_ROOT = "Root Cause (first observed failure)"
_SUMMARY = "ChildFailedError"
# torch's watchdog of NCCL, when a call took longer than the group's timeout.
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d{1,15}), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel_in>\d{1,18}), NumelOut=(?P<numel_out>\d{1,18}))?"
)
_GROUP = re.compile(r"PG GUID (?P<guid>[^\s(\]]+)(?:\((?P<desc>[^)]*)\))?")
_TIMEOUT = re.compile(
    r"watchdog caught collective operation timeout|timed? ?out (?:waiting|after)|"
    r"(?:collective|recv|send|wait)\w*[^\n]{0,80} timed? ?out",
    re.IGNORECASE,
)
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS",
            8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timeout:
    """A call that torch's watchdog gave up on, with torch's name and description of its group."""

    group: str
    desc: str
    call: Collective


def ends(path: Path) -> str:
    """The beginning and the end of a file of any size. Raises OSError."""
    with path.open("rb") as file:
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


def by_rank(text: str) -> dict[int | None, str]:
    """Lines without prefixes, by the rank in the prefix; None for lines without one.

    torch's rank counts more than the launcher's number, which is local to a node.
    """
    found: dict[int | None, list[str]] = {}
    for line in text.splitlines():
        rank = None
        while prefix := _PREFIX.match(line):
            if rank is None or prefix["kind"] == "rank":
                rank = int(prefix["number"])
            line = line[prefix.end() :]
        found.setdefault(rank, []).append(line)
    return {rank: "\n".join(lines) for rank, lines in found.items()}


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


def timeouts(text: str) -> Iterator[Timeout]:
    """The calls that NCCL's watchdog gave up on, in order."""
    for found in _WATCHDOG.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        named = _GROUP.search(line[-400:])
        seq, group = int(found["seq"]), named["guid"] if named else "0"
        desc = (named["desc"] if named else "") or ("default_pg" if group == "0" else "")
        call = Collective(
            index=max(1, seq),  # not 0: earlier calls are unknown
            group=group,
            position=seq - 1,
            op=_op(found["op"]),
            numel_in=int(found["numel_in"] or 0),
            numel_out=int(found["numel_out"] or 0),
            dtype="",
            asynchronous=True,
        )
        yield Timeout(group, "" if desc == "undefined" else desc, call)


def gave_up_waiting(error: RankError) -> bool:
    """Whether the library's timeout ended a hang; then the error is not a failure of this rank."""
    return bool(_TIMEOUT.search(error.message))


def _op(name: str) -> str:
    """``ALLREDUCE``, ``_ALLGATHER_BASE``, ``ALLTOALL_BASE``; a batch of sends is ``COALESCED``."""
    return plain_op(name.lower())


def prefixed(head: bytes) -> bool:
    """Whether a file that starts with a bracket is a log, not JSON."""
    return bool(_PREFIX.match(head.decode("utf-8", errors="replace")))


def unprefixed(text: str) -> str:
    """One rank's text without any prefixes."""
    lines = []
    for line in text.splitlines():
        while prefix := _PREFIX.match(line):
            line = line[prefix.end() :]
        lines.append(line)
    return "\n".join(lines)


def is_log(text: str) -> bool:
    """Whether text is about a run, unlike a README in the folder."""
    return bool(
        re.search(
            r"Traceback \(most recent|terminate called|ProcessGroup|torch\.distributed|\bNCCL\b|"
            r"\bstep\b|\bloss\b|\bepoch\b|\[[EWIF]\d{4} |ERROR|WARNING|INFO",
            text,
        )
    )
