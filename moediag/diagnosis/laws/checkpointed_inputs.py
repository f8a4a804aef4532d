"""Activation checkpointing computes in the backward what the forward computed."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.reduced_gradients import Sketch, sketch
from moediag.protocol.tolerance import LARGE
from moediag.result import Verdict
from moediag.result.wording import at_line, few

_ENOUGH = 2  # steps


@law(Verdict.WRONG_GRADIENTS)
def recomputed_otherwise(facts: Facts) -> Findings:
    """Modules that a watched job runs again in the backward (activation checkpointing) get other
    inputs than in the forward."""
    for own in facts.of(recorded).values():
        apart: dict[tuple[str, str], dict[int, float]] = {}
        for step, line, (module, size) in own.rows("recomputed", step=int, line=str, apart=_first):
            if size > LARGE:
                apart.setdefault((line, module), {}).setdefault(step, size)
        for (line, module), steps in apart.items():
            if len(steps) < _ENOUGH:
                continue
            size = max(steps.values())
            yield Broken(
                f"checkpoint{at_line(line)} runs {module} again in the backward, and its input "
                f"differed from that of the forward by up to {100 * min(size, 1):.0f} % of its "
                f"norm (steps {few(steps)}): the gradients belong to another forward than the "
                "loss.",
                pattern="recomputation",
                next_step="Let the checkpointed function depend on its arguments alone: no counter "
                "or flag that changes between the calls, no argument that is changed in place, and "
                "no random numbers with preserve_rng_state=False.",
            )


def _first(inputs: Iterable[tuple[str, Sketch, Sketch]]) -> tuple[str, float]:
    """The first module whose input was another one than in the forward, and how much it differed,
    as a part of its norm; "" without one."""
    found = ((str(name), agreement.far((sketch(a), sketch(b)))) for name, a, b in inputs)
    return next((one for one in found if one[1] > LARGE), ("", 0.0))
