"""What a program without a wrapper does with its gradients between the backward and the update.

A sketch is linear: that of a sum of gradients is the sum of their sketches. So the ranks' records
alone tell whether the gradients that an update uses are the ranks' own ones, added up and
multiplied by one number, and by which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moediag.diagnosis.numbers.agreement import together
from moediag.evidence.model import Evidence, recorded
from moediag.records import dataclass

#: Calls that add up tensors of ranks.
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")

Sketch = tuple[float, float]  # sum with pseudo-random signs, norm

_CLOSE = 0.01  # of the factors of different parameters
_CLEAR = 0.05  # of the norms: a sum that is much smaller is mostly rounding
_FEW = 3  # parameters


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """Gradients of one rank in one step."""

    step: int
    made: Mapping[str, Sketch]
    """By the backward."""
    used: Mapping[str, Sketch]
    """By the update."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A step in which gradients were added up over all ranks, after the backward."""

    step: int
    factor: float
    """What the sum was multiplied by."""
    names: tuple[str, ...]
    """The parameters of which this is so."""


def own_gradients(evidence: Evidence) -> dict[int, dict[int, OwnGradients]]:
    """By step and rank; only steps that all ranks of the job recorded."""
    rows = {rank: own.of("own_gradients", _read) for rank, own in recorded(evidence).items()}
    found = together({rank: [(one.step, one) for one in of] for rank, of in rows.items()})
    return found if len(rows) == evidence.world_size > 1 else {}


def reductions(evidence: Evidence) -> tuple[Reduced, ...]:
    """The steps with a factor that at least a few parameters have in common, and most of them one
    of these."""
    found = []
    for step, by_rank in own_gradients(evidence).items():
        ranks = list(by_rank.values())
        factors = {}
        for name in set.intersection(*(set(one.made) for one in ranks)):
            used = {one.used[name] for one in ranks}
            factor = multiple([one.made[name] for one in ranks], ranks[0].used[name])
            if len(used) == 1 and factor is not None and len({o.made[name] for o in ranks}) > 1:
                factors[name] = factor
        groups = {
            f: [name for name, one in factors.items() if abs(one - f) <= _CLOSE * abs(f)]
            for f in factors.values()
        }  # several where parts of the model are clipped by norms of their own
        most = max(groups, key=lambda f: len(groups[f]), default=0.0)
        alike = {name for group in groups.values() if len(group) > 1 for name in group}
        if len(alike) >= _FEW and 2 * len(alike) > len(factors):
            found.append(Reduced(step, most, tuple(sorted(alike))))
    return tuple(found)


def not_reduced(evidence: Evidence) -> frozenset[str]:
    """Parameters of which every rank used its own gradient, in all steps that reduced others."""
    steps = {one.step for one in reductions(evidence)}
    found: dict[str, bool] = {}
    for step, by_rank in own_gradients(evidence).items():
        for one in by_rank.values() if step in steps else ():
            for name, sketch in one.made.items():
                found[name] = found.get(name, True) and one.used[name] == sketch
    return frozenset(name for name, own in found.items() if own)


def multiple(made: Sequence[Sketch], used: Sketch) -> float | None:
    """The number by which the sum of ``made`` was multiplied, if it is ``used``; None where the sum
    says too little."""
    total = sum(one for one, _ in made)
    if abs(total) <= _CLEAR * sum(norm for _, norm in made):
        return None
    return used[0] / total


def is_multiple(made: Sequence[Sketch], used: Sketch, factor: float) -> bool:
    """Whether ``used`` may be the sum of ``made`` times ``factor``."""
    total = factor * sum(one for one, _ in made)
    least = abs(factor) * sum(norm for _, norm in made)
    return abs(used[0] - total) <= _CLOSE * max(least, used[1])


def _read(event: Mapping[str, Any]) -> OwnGradients:
    names = [str(name) for name in event["names"]]
    made, used = (dict(zip(names, map(sketch, event[at]), strict=True)) for at in ("made", "used"))
    return OwnGradients(int(event["step"]), made, used)


def sketch(values: Sequence[Any]) -> Sketch:
    """Reads a sum with pseudo-random signs and a norm."""
    total, norm = map(float, values)
    return total, norm
