"""A program that asks accelerate to accumulate lets it."""

from __future__ import annotations

import functools

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.protocol import build
from moediag.records import dataclass
from moediag.result.wording import at_line

_ENOUGH = 3  # checked steps


@dataclass(frozen=True, slots=True)
class Accumulated:
    """An update in a checked step."""

    step: int
    micro_batches: int
    """So many accelerate is asked to accumulate; it divides each loss by this number."""
    backwards: int
    """Calls of Accelerator.backward since the update before."""
    entered: bool
    """The program has entered `accumulate`."""
    line: str = ""
    """The user's line of the last backward, or ""."""


@law(suspects=True)
def accumulation_not_entered(facts: Facts) -> Findings:
    """accelerate divides each loss by the micro-batches that it is asked to accumulate, and the
    program updates after each backward, without `accumulate`."""
    for own in facts.of(recorded).values():
        rows = own.of("accumulation", functools.partial(build, Accumulated))
        if len(rows) >= _ENOUGH and all(not r.entered and r.backwards == 1 for r in rows):
            number = rows[0].micro_batches
            yield Suspicious(
                f"accelerate is asked to accumulate {number} micro-batches, so `backward`"
                f"{at_line(rows[0].line)} divides each loss by {number}, but the program never "
                "enters `accumulate` and updates after each backward: nothing is accumulated, and "
                f"the gradients are 1/{number} of those of the loss. Put each micro-batch into "
                "`with accelerator.accumulate(model):`."
            )
            return
