"""Detectors of ranks that stopped making progress, by their stacks alone."""

from __future__ import annotations

import re

from moediag.diagnosis.blame.standings import dividing
from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import sentence
from moediag.diagnosis.words.places import sends
from moediag.evidence.model import Evidence, Stack
from moediag.evidence.rank_stacks import (
    in_backward,
    in_collective,
    on_the_device,
    stand,
    that_counts,
)
from moediag.records import dataclass
from moediag.result import Confidence, Verdict
from moediag.result.wording import by_value, does

_JOINS = re.compile(r"^(std::thread::join|_*pthread_(timed|clock)?join(_np|_ex|_common)?)\b")
_ACQUIRES = re.compile(r"gil_scoped_acquire::gil_scoped_acquire|^take_gil$|^PyGILState_Ensure$")
_DESTRUCTOR = re.compile(r"(\w+)::~\w+")


@detector(Verdict.HANG)
def interpreter_lock(facts: Facts) -> Judgement | None:
    """Two threads of one rank wait for each other: one holds Python's interpreter lock while it
    waits for the other one to end, which waits for that lock.

    Known of torch's process groups, whose destructor joins their threads (pytorch/pytorch#56297).
    """
    found = _deadlock(facts.evidence)
    if found is None:
        return None
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
        pattern="interpreter-lock",
        next_step=step,
    )


@dataclass(frozen=True, slots=True)
class Deadlock:
    rank: int
    holder: str  # thread
    frees: str  # the class whose destructor joins the other thread, which runs its code
    line: str  # of the user's program, or ""


def _deadlock(evidence: Evidence) -> Deadlock | None:
    if evidence.stall is None:
        return None
    for rank, seen in sorted(evidence.ranks.items()):
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


@detector(Verdict.HANG)
def stacks_alone(facts: Facts) -> Judgement | None:
    """Stacks show ranks inside communication, and nothing else was recorded: no rank is named."""
    evidence = facts.evidence
    if not evidence.foreign or any(seen.collectives for seen in evidence.ranks.values()):
        return None
    found = _sides(evidence)
    inside = any(rank in facts.waiting for who in found.values() for rank in who)
    # The ranks of stacks may be unknown, though not where these stand.
    inside |= any(one.kind == "stack" and one.op for one in evidence.reports)
    if not inside and not _all_on_the_device(evidence):
        return None
    sides = [does(who, f"is {at}") for at, who in found.items()]
    sides += log_sentences.unnamed_stacks(evidence)
    text = sentence("; ".join(sides))
    text += (
        f" {_open_question(found)} Only stacks were seen: they show where ranks are, not which "
        "calls they made before."
    )
    step = _either_way(facts) or foreign_jobs.next_step(evidence)
    return Judgement(Confidence.LOW, text, pattern="stacks", next_step=step)


def _either_way(facts: Facts) -> str:
    """The condition that sends ranks to different calls, or ""."""
    split = dividing([one for one in facts.standings if {*one.ranks} <= {*facts.waiting}])
    return f"{sends(*split)}: both must make the same calls." if split is not None else ""


def _all_on_the_device(evidence: Evidence) -> bool:
    """Whether all ranks, more than one, wait for their devices: a collective may run there."""
    stacks = [that_counts(seen.stacks) for seen in evidence.ranks.values()]
    return len(stacks) > 1 and all(one is not None and on_the_device(one) for one in stacks)


def _sides(evidence: Evidence) -> dict[str, tuple[int, ...]]:
    """The ranks by where they stand."""
    told = {}
    for rank, seen in evidence.ranks.items():
        stack = that_counts(seen.stacks)
        if stack is None:
            continue
        if in_collective(stack):
            text = f"in {stand(stack, seen.libraries)}"
        elif in_backward(stack):
            text = f"in autograd, which may wait in communication: {stand(stack, seen.libraries)}"
        elif on_the_device(stack):
            text = f"waiting for the device in {stand(stack, seen.libraries)}"
        else:
            text = f"outside communication in {stand(stack, seen.libraries)}"
        told[rank] = text
    return by_value(told)


def _open_question(found: dict[str, tuple[int, ...]]) -> str:
    seen = sum(map(len, found.values()))
    if len(found) > 1:
        return (
            "It is not known which side is wrong: the side whose call comes first in the program "
            "is behind, whether it has more ranks or fewer."
        )
    if len(found) == 1 and seen > 1:
        text = "All ranks that were seen are at the same place, so it is not known which rank they "
        return text + "wait for."
    return "It is not known which rank the job waits for."
