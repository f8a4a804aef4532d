"""Where an awaited rank is: the line of the user's code, and what it does there."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.evidence.model import Evidence, RankEvidence, Stack
from moediag.evidence.rank_stacks import waits_for_device
from moediag.protocol import in_libraries, innermost_user

_DATA = ("torch/utils/data/", "/datasets/", "webdataset")
_MUTE = "the rank did not answer"  # the capture's text for a recorder thread that never ran


def whereabouts(evidence: Evidence, ranks: Iterable[int]) -> str:
    """One sentence for each of ``ranks`` that has a stack; "" without any."""
    texts = [_one(evidence, evidence.ranks[rank]) for rank in ranks if rank in evidence.ranks]
    return " ".join(text for text in texts if text)


def program_line(seen: RankEvidence) -> str:
    """``train.py:12 function``, the innermost frame of the user's code; "" without one."""
    stack = _main(seen)
    python = [frame for frame in stack.frames if not frame.native] if stack is not None else []
    own = innermost_user([frame.file for frame in python], seen.libraries)
    if own is None:
        return ""
    frame = python[own]
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"


def _one(evidence: Evidence, seen: RankEvidence) -> str:
    stack = _main(seen)
    at = f" at {line}" if (line := program_line(seen)) else ""
    who = f"Rank {seen.rank}"
    if seen.os_state == "T":
        return f"{who} is stopped by a signal (SIGSTOP){at}."
    if stack is None:
        return ""
    if stack.holds_gil and _mute(evidence, seen.rank):
        return f"{who} holds the GIL in native code{at}: no other thread of it can run."
    if _loads_data(stack, seen.libraries):
        return f"{who} waits for data{at}."
    if waits_for_device(seen.stacks):
        return f"{who} waits for its device{at}."
    if not at:
        return ""
    return f"{who} computes{at}." if seen.os_state == "R" else f"{who} is{at}."


def _loads_data(stack: Stack, libraries: tuple[str, ...]) -> bool:
    files = [frame.file for frame in stack.frames if not frame.native]
    found = zip(files, in_libraries(files, libraries), strict=True)
    return any(library and any(part in file for part in _DATA) for file, library in found)


def _main(seen: RankEvidence) -> Stack | None:
    usable = [stack for stack in seen.stacks if stack.frames]
    return next((s for s in usable if s.thread == "MainThread"), usable[0] if usable else None)


def _mute(evidence: Evidence, rank: int) -> bool:
    return any(text.startswith(f"rank {rank}: ") and _MUTE in text for text in evidence.not_seen)
