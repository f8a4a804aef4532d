"""Lists the ranks that failed, and which failures are only consequences of another rank's.

When a rank dies, its peers get errors from the communication library ("Connection reset by peer"
on gloo). After a size mismatch gloo aborts one rank, not necessarily the one at fault. Such an
error shows *that* ranks disagreed, never which one is at fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from moediag.evidence.model import UNTOLD, Evidence, RankError, RankEvidence
from moediag.evidence.rank_stacks import of_user
from moediag.records import dataclass

# Messages of communication libraries when a peer is gone or sent something else.
_COMMUNICATION = re.compile(
    r"connection (?:reset|closed|refused)|broken pipe|gloo|nccl|enforcenotmet|"
    r"mismatch between collectives|socket timeout|recvvalue failed|"
    r"(?:collective|operation|barrier|store).{0,80}timed? ?out|"
    r"timed? ?out.{0,80}(?:collective|store)|"
    r"process group watchdog|c10d|monitoredbarrier|ncclUniqueId|clients joined|hccl|oneccl|"
    r"application timeout caused pair closure|"
    r"mpi_err_(?:proc_failed|other)|\bUCX error|transport retry count",
    re.IGNORECASE,
)
_COMMUNICATION_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "RendezvousTimeoutError"}
)
# Errors of Python itself, whose messages may name a library ("communication hook required NCCL
# 2.10+", "Operator c10d.allgather_.default does not have a sharding strategy"), and the guard's own
# (moediag.recorder.guard): no peer received anything.
GUARD = "ReductionMismatch"
# A device that failed under this rank, whichever thread noticed it first.
_OF_DEVICE = re.compile(
    r"CUDA error:(?! *(?:CUDA_ERROR_)?(?:NCCL|system not))|uncorrectable ECC|"
    r"Cuda failure (?:\d+ )?'out of memory'",
    re.IGNORECASE,
)
_NEVER_SENT = frozenset(
    {
        "NotImplementedError", "TypeError", "AttributeError", "NameError", "ImportError",
        "ModuleNotFoundError", "KeyError", "IndexError", "ValueError", GUARD,
    }
)  # fmt: skip
# "Cannot use ReduceOp.PREMUL_SUM with Gloo": nothing was sent either, nor by a rank whose port
# another process has.
_REFUSED = re.compile(r"cannot use reduceop|address already in use", re.IGNORECASE)
# The messages of gloo (gloo/transport/tcp/pair.cc) and torch's ProcessGroupWrapper.
_MISMATCH = re.compile(
    r"collective mismatch|mismatch between collectives|op\.preamble\.length", re.IGNORECASE
)
# Of gloo, stores and NCCL's watchdog: a rank waited as long as its program allows.
_GAVE_UP = re.compile(
    r"timed out waiting \d+ ?ms|wait timeout after \d|operation timeout|application timeout", re.I
)
_BEGIN = 60  # characters of a message that identify it
_SUMMARY = 480  # characters: two or three sentences
# Nobody sends these to a rank because another one failed, as launchers do with SIGTERM and SIGKILL.
_LAUNCHER_WAITS = 0.5  # seconds before SIGKILL, at least: Open MPI waits 1, torchrun 30
FATAL_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"})
_ENDED_FROM_OUTSIDE = frozenset({"KeyboardInterrupt", "SignalException", "SystemExit"})


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    name: str
    """Exception type, signal or "exit code N"."""
    message: str = ""
    where: str = ""
    called: str = ""
    """The line of another of the user's files that led there, "" if there is none."""
    consequence: bool = False
    """Another rank's failure, or a mismatch, explains it."""
    mismatch: bool = False
    """Its message reports that collectives did not match."""
    time: float = 0.0
    gave_up: bool = False
    """It waited for other ranks for as long as its program allows."""
    after: str = ""
    """The exception that it was raised from or while handling."""

    @property
    def summary(self) -> str:
        """The message on one line, cut to whole sentences where it is long; "" without one."""
        text = " ".join(self.message.split())
        if len(text) <= _SUMMARY:
            return text
        head = text[:_SUMMARY]
        end = head.rfind(". ")
        return head[: end + 1] if end > _SUMMARY // 3 else head.rstrip() + "…"


def failures(evidence: Evidence) -> tuple[Failure, ...]:
    """All ranks that failed by themselves. Own failures come before consequences, then the order
    is what the launcher saw, the exception's time, the rank."""
    found = [f for seen in evidence.ranks.values() if (f := _failure(seen)) is not None]
    seen_order = {rank: i for i, rank in enumerate(evidence.deaths)}
    late = len(seen_order)

    def first(f: Failure) -> tuple[bool, float, int, int]:
        return f.consequence, f.time or float("inf"), seen_order.get(f.rank, late), f.rank

    return tuple(sorted(found, key=first))


def _failure(seen: RankEvidence) -> Failure | None:
    end, error = seen.exit, seen.error
    ended_badly = end is not None and not end.by_us and (end.signal is not None or bool(end.code))
    if error is not None and error.type not in _ENDED_FROM_OUTSIDE:
        if not ended_badly and (seen.finished or (end is not None and end.code == 0)):
            return None  # handled the exception and ran to the end
        return Failure(
            rank=seen.rank,
            name=error.type,
            message=error.message,
            where=error.where,
            called=_called(error, seen.libraries),
            consequence=is_communication(error) or _from_a_call(seen, error),
            mismatch=bool(_MISMATCH.search(error.message)),
            time=error.time,
            gave_up=is_communication(error) and bool(_GAVE_UP.search(error.message)),
            after=error.after,
        )
    if not ended_badly or end is None:
        return None
    name = end.signal or f"exit code {end.code}"
    broken = next((call for call in seen.collectives if call.failed), None)
    if end.signal in (None, UNTOLD) and broken is not None:
        # The program itself (hydra, Ray, a try block) turned the exception into an exit.
        return Failure(seen.rank, name, broken.failed, consequence=True, time=broken.time)
    text = "\n".join(seen.last_lines)
    aborted = end.signal == "SIGABRT" and bool(_COMMUNICATION.search(text))
    return Failure(
        seen.rank, name, consequence=aborted, mismatch=aborted and bool(_MISMATCH.search(text))
    )


def _from_a_call(seen: RankEvidence, error: RankError) -> bool:
    """Whether the program raised it because a call failed, with words of its own."""
    return any(c.failed and c.failed[:_BEGIN] in error.after for c in seen.collectives)


def _called(error: RankError, libraries: Sequence[str]) -> str:
    """The innermost line of the user's code in another file than ``error.where``."""
    own = of_user(error.frames, libraries)
    file = error.where.partition(":")[0]
    inside = any(frame.name == file for frame in own)
    return next((f.place for f in own if f.name != file), "") if inside else ""


def first_of(
    own: Sequence[Failure], deaths: Sequence[int], seen_at: Mapping[int, float]
) -> tuple[tuple[Failure, ...], bool]:
    """The failures among ``own`` that may have come first, and whether that is certain.

    An exception has its own time. A fatal signal leaves none: its launcher notices the death a
    moment later. So a death noticed before an exception (``deaths``: ranks in that order) came
    first, and one noticed after it may have come first too. A SIGKILL soon after it (``seen_at``)
    did not come from a launcher, which lets the other ranks end by themselves first.
    """
    lead = own[0]
    if not lead.time or lead.rank not in deaths:
        return (lead,), True
    killed = [
        f
        for f in own
        if f.rank != lead.rank
        and (
            f.name in FATAL_SIGNALS
            or (f.name == "SIGKILL" and seen_at.get(f.rank, math.inf) - lead.time < _LAUNCHER_WAITS)
        )
    ]
    if not killed:
        return (lead,), True
    noticed = {rank: place for place, rank in enumerate(deaths)}
    before = [f for f in killed if noticed.get(f.rank, len(deaths)) < noticed[lead.rank]]
    if before:
        return tuple(sorted(before, key=lambda f: noticed[f.rank])), True
    return (lead, *killed), False


def is_communication(error: RankError) -> bool:
    """Whether the communication library raised it, not the program."""
    if (
        error.type in _NEVER_SENT
        or _REFUSED.search(error.message)
        or _OF_DEVICE.search(error.message)
    ):
        return False
    return error.type.rpartition("::")[2] in _COMMUNICATION_TYPES or bool(
        _COMMUNICATION.search(error.type) or _COMMUNICATION.search(error.message)
    )


def said(failed: Sequence[Failure]) -> str:
    """The first message among the failures, of one that gave up if any did: the others lost it.
    Without a message, the first failure's name."""
    told = next((f for f in sorted(failed, key=lambda f: not f.gave_up) if f.summary), failed[0])
    return f"{told.name}: {told.summary}" if told.summary else told.name
