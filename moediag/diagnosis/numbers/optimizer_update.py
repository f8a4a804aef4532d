"""Compares the optimizer's update with a single process: weights that moved in a step that should
change nothing, a wrong learning rate, a wrong count of updates.

Ranks agree, and the gradients of the step may be right: neither replicas nor gradients show it
before the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.gradients import number
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import SAME_RATE
from moediag.records import dataclass
from moediag.result.verdicts import RATE, UPDATES, WEIGHTS
from moediag.result.wording import error_size, listed, plural, ranks

if TYPE_CHECKING:
    from moediag.protocol import Applied


@dataclass(frozen=True, slots=True)
class AppliedFacts:
    """The first difference of weights, learning rate or count of updates after a step."""

    step: int | None = None
    """From 1; None where nothing differs."""
    what: str = ""
    """WEIGHTS, RATE or UPDATES."""
    wrong: tuple[str, ...] = ()
    """FQNs."""
    compared: int = 0
    worst: str = ""
    """The FQN that differs most."""
    error: float = 0.0
    """How much it differs."""
    moved: float = 0.0
    """How far the reference moved it."""
    ranks: tuple[int, ...] = ()
    """Ranks where it is wrong."""
    actual: float = 0.0
    """The value of a wrong number; of wrong weights the learning rate, if that is wrong too."""
    right: float = 0.0
    """That number in a single process."""
    updates: tuple[float, float] | None = None
    """Of wrong weights the count of updates, here and in a single process, if that is wrong too."""


def applied_facts(evidence: Evidence) -> AppliedFacts:
    by_step: dict[int, dict[int, Applied]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        for text, applied in (seen.outcome.applied if seen.outcome is not None else {}).items():
            by_step.setdefault(int(text), {})[rank] = applied
    for step in sorted(by_step):
        found = _of_step(step, by_step[step])
        if found is not None:
            return found
    compared = {fqn for of in by_step.values() for a in of.values() for fqn in a.weights}
    return AppliedFacts(compared=len(compared))


def _of_step(step: int, of_ranks: Mapping[int, Applied]) -> AppliedFacts | None:
    wrong: dict[str, None] = {}
    where: list[int] = []
    worst, error, moved = "", -1.0, 0.0
    for rank, applied in of_ranks.items():
        for fqn, weight in applied.weights.items():
            if not weight.wrong:
                continue
            wrong[fqn] = None
            where.append(rank)
            size = number(weight.max_abs)
            if math.isnan(size) or size > error:
                worst, error, moved = fqn, size, number(weight.scale)
    if wrong:
        compared = len({fqn for a in of_ranks.values() for fqn in a.weights})
        found = tuple(sorted(set(where)))
        at_fault = (of_ranks[rank] for rank in found)
        rate = next((a for a in at_fault if _off(a.rate, a.reference_rate)), None)
        return AppliedFacts(
            step, WEIGHTS, tuple(wrong), compared, worst, error, moved, found,
            actual=(rate.rate or 0.0) if rate is not None else 0.0,
            right=(rate.reference_rate or 0.0) if rate is not None else 0.0,
            updates=next(
                (
                    (a.updates or 0.0, a.reference_updates or 0.0)
                    for a in of_ranks.values()
                    if _off(a.updates, a.reference_updates)
                ),
                None,
            ),
        )  # fmt: skip
    for what, actual, right in (
        (UPDATES, "updates", "reference_updates"),
        (RATE, "rate", "reference_rate"),
    ):
        off = {
            rank: (getattr(a, actual), getattr(a, right))
            for rank, a in of_ranks.items()
            if _off(getattr(a, actual), getattr(a, right))
        }
        if off:
            is_now, should = next(iter(off.values()))
            return AppliedFacts(step, what, ranks=tuple(off), actual=is_now, right=should)
    return None


def _off(actual: float | None, right: float | None) -> bool:
    return actual is not None and right is not None and agreement.apart((actual, right), SAME_RATE)


def sentence(facts: AppliedFacts) -> str:
    """What is wrong; "" where nothing is."""
    if facts.step is None:
        return ""
    after = f"After step {facts.step}"
    where = ranks(facts.ranks)
    if facts.what != WEIGHTS:
        noun = "the optimizer's count of updates" if facts.what == UPDATES else "the learning rate"
        return (
            f"{after} {noun} is {facts.actual:.6g} on {where} and should be {facts.right:.6g} "
            "(single process)."
        )
    return (
        f"{after} the weights of {len(facts.wrong)} of {plural(facts.compared, 'parameter')} "
        f"are not those of a single process ({listed(facts.wrong)}, on {where}); largest "
        f"difference {error_size(facts.error)} in {facts.worst}, which training should have moved "
        f"by {error_size(facts.moved)} by then.{_because(facts)}"
    )


def advice(facts: AppliedFacts) -> str:
    """What to look at."""
    if facts.what == RATE:
        return "Compare what sets the learning rate with one process: its scaling, its schedule."
    if facts.what == UPDATES or facts.updates is not None:
        return "Load the optimizer's state as one process does."
    return f"Check what changes {listed(facts.wrong)} after the gradients are reduced."


def _because(facts: AppliedFacts) -> str:
    if facts.updates is not None:
        own, right = facts.updates
        return (
            f" The optimizer has counted {plural(int(own), 'update')} by then, {int(right)} in one "
            "process: it began with another state."
        )
    if facts.actual == facts.right:
        return ""
    where = ranks(facts.ranks)
    return f" The learning rate is {facts.actual:.6g} on {where}, {facts.right:.6g} in one process."
