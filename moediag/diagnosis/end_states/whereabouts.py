"""Where an awaited rank is: the line of the user's code, and what it does there."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.evidence.model import Evidence, RankEvidence, Stack, Worker
from moediag.evidence.rank_stacks import in_collective, of_user, that_counts, waits_for_device

_DATA = ("torch/utils/data/", "/datasets/", "webdataset")
# Where the code of a child process begins.
_CHILD = ("torch/utils/data/_utils/worker.py", "multiprocessing/process.py")
_MOST_WORKERS = 3
# What a rank does, for activity().
STOPPED = "is stopped by a signal (SIGSTOP)"
HOLDS_GIL = "holds the GIL in native code"
LOADS_DATA = "waits for data"
COMPUTES = "computes"
IS = "is"
_BECAUSE = {HOLDS_GIL: ": no other thread of it can run."}
_MUTE = "the rank did not answer"  # the capture's text for a recorder thread that never ran


def whereabouts(evidence: Evidence, ranks: Iterable[int]) -> str:
    """One sentence for each of ``ranks`` that has a stack; "" without any."""
    texts = [_one(evidence, evidence.ranks[rank]) for rank in ranks if rank in evidence.ranks]
    return " ".join(text for text in texts if text)


def program_line(seen: RankEvidence) -> str:
    """``train.py:12 function``, the innermost frame of the user's code; "" without one."""
    return next(iter(program_lines(seen)), "")


def program_lines(seen: RankEvidence) -> tuple[str, ...]:
    """All frames of the user's code, innermost first, as ``train.py:12 function``."""
    stack = main_stack(seen)
    own = of_user(stack.frames, seen.libraries) if stack is not None else ()
    return tuple(frame.place for frame in own)


def _one(evidence: Evidence, seen: RankEvidence) -> str:
    line, what = program_line(seen), activity(evidence, seen)
    if not what or (what == IS and not line):
        return ""
    text = f"Rank {seen.rank} {what}{f' at {line}' if line else ''}" + _BECAUSE.get(what, ".")
    return f"{text} {workers}" if what == LOADS_DATA and (workers := busy_workers(seen)) else text


def busy_workers(seen: RankEvidence) -> str:
    """``Its worker process 4242 is at data.py:33 get.``; "" if none runs the user's code."""
    lines = [(w.pid, line) for w in seen.workers if (line := _worker_line(w, seen.libraries))]
    told = [f"Its worker process {pid} is at {line}." for pid, line in lines[:_MOST_WORKERS]]
    return " ".join(told)


def _worker_line(worker: Worker, libraries: tuple[str, ...]) -> str:
    for stack in worker.stacks:
        # Frames outside it are those of the rank at the fork.
        begin = next((i for i, f in enumerate(stack.python) if f.file.endswith(_CHILD)), 0)
        for frame in of_user(stack.frames, libraries)[:1]:
            if frame in stack.python[:begin]:
                return frame.place
    return ""


def activity(evidence: Evidence, seen: RankEvidence) -> str:
    """What a rank outside any collective does, as words after "rank 1 "; "" without a stack."""
    stack = main_stack(seen)
    if seen.os_state == "T":
        return STOPPED
    if stack is None:
        return ""
    mute = (t for t in evidence.not_seen if t.startswith(f"rank {seen.rank}: ") and _MUTE in t)
    if stack.holds_gil and any(mute):
        return HOLDS_GIL
    if _loads_data(stack, seen.libraries):
        return LOADS_DATA
    if waits_for_device(seen.stacks):
        return "waits for its device"
    runs = seen.os_state == "R" if stack.thread == "MainThread" else stack.active
    return COMPUTES if runs and program_line(seen) else IS


def _loads_data(stack: Stack, libraries: tuple[str, ...]) -> bool:
    own = of_user(stack.frames, libraries)
    others = (frame.file for frame in stack.python if frame not in own)
    return any(part in file for file in others for part in _DATA)


def main_stack(seen: RankEvidence) -> Stack | None:
    """The thread that runs the user's program: the main thread, unless all its frames are a
    library's and exactly one other thread has the user's (Ray)."""
    usable = [stack for stack in seen.stacks if stack.frames]
    main = next((s for s in usable if s.thread == "MainThread"), usable[0] if usable else None)
    if main is None or of_user(main.frames, seen.libraries):
        return main
    others = [s for s in usable if s.source == main.source and s is not main]
    running = [stack for stack in others if of_user(stack.frames, seen.libraries)]
    # py-spy's JSON and its native text both have each thread.
    return running[0] if len({stack.thread for stack in running}) == 1 else main


def shown_stack(seen: RankEvidence) -> Stack | None:
    """The stack to show: that of a thread inside a collective, else of the user's program."""
    inside = that_counts(seen.stacks)
    return inside if inside is not None and in_collective(inside) else main_stack(seen)
