"""Where a rank stands that others wait for: the line of its own code, and what it does there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moediag.evidence.model import Evidence, Frame, RankEvidence, Stack
from moediag.evidence.rank_stacks import waits_for_device

# Frames of the machinery, not of the program that a person wrote.
_NOT_USER = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<|[/\\]moediag[/\\]"
)
_DATA = ("torch/utils/data/", "/datasets/", "webdataset")
_MUTE = "the rank did not answer"  # what the capture says of a recorder thread that never ran


def whereabouts(evidence: Evidence, ranks: Iterable[int]) -> str:
    """A sentence for each of ``ranks`` whose stack was seen; "" without any."""
    texts = [_one(evidence, evidence.ranks[rank]) for rank in ranks if rank in evidence.ranks]
    return " ".join(text for text in texts if text)


def user_frame(stack: Stack) -> Frame | None:
    """The innermost frame of a person's own code."""
    python = (frame for frame in stack.frames if not frame.native)
    return next((frame for frame in python if not _NOT_USER.search(frame.file)), None)


def program_line(seen: RankEvidence) -> str:
    """``train.py:12 function``, the innermost of a person's own code; "" where it was not seen."""
    stack = _main(seen)
    frame = user_frame(stack) if stack is not None else None
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}" if frame else ""


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
    if any(part in f.file for f in stack.frames for part in _DATA):
        return f"{who} waits for data{at}."
    if waits_for_device(seen.stacks):
        return f"{who} waits for its device{at}."
    if not at:
        return ""
    return f"{who} computes{at}." if seen.os_state == "R" else f"{who} stands{at}."


def _main(seen: RankEvidence) -> Stack | None:
    usable = [stack for stack in seen.stacks if stack.frames]
    return next((s for s in usable if s.thread == "MainThread"), usable[0] if usable else None)


def _mute(evidence: Evidence, rank: int) -> bool:
    return any(text.startswith(f"rank {rank}: ") and _MUTE in text for text in evidence.not_seen)
