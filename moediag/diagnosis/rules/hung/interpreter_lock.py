"""Two threads of one rank wait for each other: one holds Python's interpreter lock while it waits
for the other one to end, which waits for that lock.

Known of torch's process groups, whose destructor joins their threads (pytorch/pytorch#56297).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.evidence.model import Stack
from moediag.result import Confidence, Verdict

VERDICT = Verdict.HANG
SIGNATURE = "interpreter-lock"

_JOINS = re.compile(r"^(std::thread::join|_*pthread_(timed|clock)?join(_np|_ex|_common)?)\b")
_ACQUIRES = re.compile(r"gil_scoped_acquire::gil_scoped_acquire|^take_gil$|^PyGILState_Ensure$")
_DESTRUCTOR = re.compile(r"(\w+)::~\w+")


@dataclass(frozen=True, slots=True)
class Deadlock:
    rank: int
    holder: str  # thread
    frees: str  # the class whose destructor joins the other thread, or ""
    line: str  # of the user's program, or ""


def find(facts: Facts) -> Deadlock | None:
    if facts.evidence.stall is None:
        return None
    for rank, seen in sorted(facts.evidence.ranks.items()):
        holders = {stack.thread for stack in seen.stacks if stack.holds_gil}
        joining = [s for s in seen.stacks if s.thread in holders and _innermost(s, _JOINS)]
        if joining and any(map(_waits_for_the_lock, seen.stacks)):
            return Deadlock(rank, joining[0].thread, _freed(joining[0]), program_line(seen))
    return None


def _innermost(stack: Stack, what: re.Pattern[str]) -> bool:
    """Whether the innermost frame with a known name is ``what``."""
    named = (f for f in stack.frames if f.function != "?" and not f.function.startswith("0x"))
    first = next(named, None)
    return first is not None and first.native and what.search(first.function) is not None


def _waits_for_the_lock(stack: Stack) -> bool:
    """Whether it is a thread of a C++ library that asks for the lock: nothing else can be what a
    destructor joins."""
    return all(frame.native for frame in stack.frames) and any(
        _ACQUIRES.search(frame.function) for frame in stack.frames
    )


def _freed(stack: Stack) -> str:
    found = (_DESTRUCTOR.search(frame.function) for frame in stack.frames)
    return next((one[1] for one in found if one is not None), "")


def judge(facts: Facts, found: Deadlock) -> Judgement:
    at = f" at {found.line}" if found.line else ""
    frees = f", in the destructor of {found.frees}" if found.frees else ""
    text = (
        f"Two threads of rank {found.rank} wait for each other: {found.holder} holds Python's "
        f"interpreter lock{at} and waits for another thread to end{frees}; that thread waits for "
        "the interpreter lock."
    )
    step = ""
    if found.frees.startswith("ProcessGroup"):
        step = (
            "Free what holds the process group, such as a model wrapped in DistributedDataParallel "
            "(`del model`), before `destroy_process_group()`. "
            "Known upstream: https://github.com/pytorch/pytorch/issues/56297"
        )
    return Judgement(
        Confidence.HIGH,
        text,
        culprits=(found.rank,),
        victims=apart(facts.waiting, (found.rank,)),
        pattern=SIGNATURE,
        next_step=step,
    )
