"""The update uses the gradients of its own backward."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law
from moediag.diagnosis.numbers.reduced_gradients import (
    OwnGradients,
    is_multiple,
    own_gradients,
    reductions,
)
from moediag.result import Verdict
from moediag.result.wording import listed, plural

_ENOUGH = 3  # steps


@law(Verdict.WRONG_GRADIENTS)
def gradients_stale(facts: Facts) -> Findings:
    """A watched job that reduces its gradients itself updates with those of an earlier step."""
    steps = facts.of(own_gradients)
    factors = {one.step: one.factor for one in facts.of(reductions)}
    names = {name for ranks in steps.values() for one in ranks.values() for name in one.made}
    found = [name for name in sorted(names) if _stale(name, steps, factors)]
    if found and len(factors) >= _ENOUGH:
        yield Broken(
            f"In all checked steps the update used gradients of {plural(len(found), 'parameter')} "
            f"({listed(found)}) that the backward of the step before had made, or that had not "
            "changed since the first step; those of the other parameters were reduced after their "
            "own backward.",
            pattern="stale",
            next_step="Wait for the reduction of these gradients before they are read, and copy "
            "its result into .grad.",
            names=tuple(found),
        )


def _stale(name: str, steps: dict[int, dict[int, OwnGradients]], factors: dict[int, float]) -> bool:
    """Whether a gradient is never that of its own step: it is the reduced one of the step before in
    all steps of which that was recorded, or the same in all steps while the backward's changed."""
    rows = {
        step: (
            [one.made[name] for one in ranks.values()],
            [one.used[name] for one in ranks.values()],
        )
        for step, ranks in steps.items()
        if step in factors and all(name in one.made for one in ranks.values())
    }
    if len(rows) < _ENOUGH or any(
        len(set(used)) > 1 or not used[0][1] for _, used in rows.values()
    ):
        return False
    if any(is_multiple(made, used[0], factors[step]) for step, (made, used) in rows.items()):
        return False
    if len({used[0] for _, used in rows.values()}) == 1:
        return len({made[0] for made, _ in rows.values()}) == len(rows)
    after = [step for step in rows if step - 1 in rows]
    return len(after) > 1 and all(
        is_multiple(rows[step - 1][0], rows[step][1][0], factors[step - 1]) for step in after
    )
