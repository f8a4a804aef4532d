"""Two threads of one rank wait for each other: one holds Python's interpreter lock while it waits
for the other one to end, which waits for that lock.

Known of torch's process groups, whose destructor joins their threads (pytorch/pytorch#56297).
"""

from __future__ import annotations

import re

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.evidence.model import Stack
from moediag.records import dataclass
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
    frees: str  # the class whose destructor joins the other thread, which runs its code
    line: str  # of the user's program, or ""


def find(facts: Facts) -> Deadlock | None:
    if facts.evidence.stall is None:
        return None
    for rank, seen in sorted(facts.evidence.ranks.items()):
        holders = {stack.thread for stack in seen.stacks if stack.holds_gil}
        for stack in seen.stacks:
            frees = _freed(stack) if stack.thread in holders and _innermost(stack, _JOINS) else ""
            if frees and any(_waits_for_the_lock(other, frees) for other in seen.stacks):
                return Deadlock(rank, stack.thread, frees, program_line(seen))
    return None


def _innermost(stack: Stack, what: re.Pattern[str]) -> bool:
    """Whether the innermost frame with a known name is ``what``."""
    named = (f for f in stack.frames if f.function != "?" and not f.function.startswith("0x"))
    first = next(named, None)
    return first is not None and first.native and what.search(first.function) is not None


def _waits_for_the_lock(stack: Stack, owner: str) -> bool:
    """Whether it is a native thread in code of class ``owner`` that asks for the lock: a thread of
    anything else need not be the one that is joined."""
    names = [frame.function for frame in stack.frames]
    return (
        all(frame.native for frame in stack.frames)
        and any(map(_ACQUIRES.search, names))
        and any(f"{owner}::" in name for name in names)
    )


def _freed(stack: Stack) -> str:
    """The innermost class whose destructor runs, or ""."""
    found = (_DESTRUCTOR.search(frame.function) for frame in stack.frames)
    return next((one[1] for one in found if one is not None), "")


def judge(facts: Facts, found: Deadlock) -> Judgement:
    at = f" at {found.line}" if found.line else ""
    text = (
        f"Two threads of rank {found.rank} wait for each other: {found.holder} holds Python's "
        f"interpreter lock{at} and waits for another thread to end, in the destructor of "
        f"{found.frees}; that thread waits for the interpreter lock."
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
