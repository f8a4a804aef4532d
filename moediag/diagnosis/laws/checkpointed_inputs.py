"""Activation checkpointing computes in the backward what the forward computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.protocol.tolerance import LARGE
from moediag.records import dataclass
from moediag.result import Verdict
from moediag.result.wording import at_line

_ENOUGH = 2  # steps


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A region that was run again in the backward."""

    step: int
    line: str
    module: str
    """The first module whose input was another one than in the forward, or ""."""
    size: float
    """How much it differed, as a part of its norm."""


@law(Verdict.WRONG_GRADIENTS)
def recomputed_otherwise(facts: Facts) -> Findings:
    """Modules that a watched job runs again in the backward (activation checkpointing) get other
    inputs than in the forward."""
    for own in facts.of(recorded).values():
        apart: dict[tuple[str, str], dict[int, Recomputed]] = {}
        for one in own.of("recomputed", _read):
            if one.size > LARGE:
                apart.setdefault((one.line, one.module), {}).setdefault(one.step, one)
        for (line, module), steps in apart.items():
            if len(steps) < _ENOUGH:
                continue
            size = max(one.size for one in steps.values())
            told = ", ".join(map(str, list(steps)[:6]))
            yield Broken(
                f"checkpoint{at_line(line)} runs {module} again in the backward, and its input "
                f"differed from that of the forward by up to {100 * min(size, 1):.0f} % of its "
                f"norm (steps {told}): the gradients belong to another forward than the loss.",
                pattern="recomputation",
                next_step="Let the checkpointed function depend on its arguments alone: no counter "
                "or flag that changes between the calls, no argument that is changed in place, and "
                "no random numbers with preserve_rng_state=False.",
            )


def _read(event: Mapping[str, Any]) -> Recomputed:
    found = (
        (str(module), agreement.far((_pair(one), _pair(two))))
        for module, one, two in event["apart"]
    )
    module, size = next((one for one in found if one[1] > LARGE), ("", 0.0))
    return Recomputed(int(event["step"]), str(event["line"]), module, size)


def _pair(values: Any) -> tuple[float, float]:
    total, norm = map(float, values)
    return total, norm
