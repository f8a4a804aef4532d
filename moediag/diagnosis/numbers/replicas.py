"""Finds values that must be equal on several ranks and are not, from the sketches of each rank.

Ranks that declare the same slice of the same parameter hold replicas of it: its weights and its
optimizer state must be equal after every step, its gradients before clipping. The norm that scales
the gradients, the optimizer's step count and its learning rates must be equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers import agreement, norms
from moediag.diagnosis.numbers.gradients import number
from moediag.diagnosis.numbers.norms import NormScope, WrongNorm
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import (
    GRADIENT,
    REPLICA_GRADIENT,
    REPLICA_STATE,
    REPLICA_WEIGHT,
    SAME_RATE,
)
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.protocol import Outcome, Replica, Sketch

    Held = Mapping[tuple[str, str], Mapping[int, Replica]]

# Where the gradient is negligible beside the largest one, an optimizer's moments contain only
# rounding errors.
NOTHING = 1e-4
NORM = 1e-5  # relative; a number that a library reduced is the same on all ranks

WEIGHTS, GRADIENTS = "weights", "gradients"
OPTIMIZER_STATE = "optimizer state"
GRADIENT_NORM, STEPS, RATE = "gradient norm", "optimizer steps", "learning rate"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One disagreement, in one step, between ranks that must agree."""

    what: str
    """One of the six names above."""
    step: int
    """From 1; 0 is before training."""
    ranks: tuple[int, ...]
    """Ranks that hold the worst parameter; all ranks for a number."""
    culprits: tuple[int, ...] = ()
    """The ranks outside a strict majority; empty without one."""
    parameters: tuple[str, ...] = ()
    """FQNs that differ."""
    worst: str = ""
    """The FQN that differs most."""
    slice: str = ""
    """The slice of that parameter."""
    size: float | None = None
    """The distance between replicas: for gradients relative to their norm, for weights to the
    update; None where one side has none."""
    values: Mapping[int, float] | None = None
    """Rank -> the value of a number."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What must be equal on several ranks, and is not."""

    found: tuple[Disagreement, ...] = ()
    """Disagreements by step, in the order in which a step produces them."""
    compared: int = 0
    """Slices that at least two ranks hold."""
    scope: NormScope = field(default_factory=NormScope)
    """What the norms cover, in the first step in which they differ."""
    true_norm: float | None = None
    wrong_norm: WrongNorm | None = None

    @property
    def first(self) -> Disagreement | None:
        return self.found[0] if self.found else None


def replica_facts(evidence: Evidence) -> ReplicaFacts:
    outcomes = {r: seen.outcome for r, seen in evidence.ranks.items() if seen.outcome is not None}
    compared: set[tuple[str, str]] = set()
    steps = sorted({int(step) for o in outcomes.values() for step in o.replicas})
    numbered = max((len(o.gradient_norms) for o in outcomes.values()), default=0)
    found: list[Disagreement] = []
    for step in sorted({*steps, *range(1, numbered + 1)}):
        found += _of_step(outcomes, step, compared)
    apart = next((d for d in found if d.what == GRADIENT_NORM), None)
    scope = NormScope()
    if apart is not None:
        scope = norms.scope(outcomes, apart.step, dict(apart.values or {}))
    return ReplicaFacts(
        found=tuple(_blamed(found, scope)),
        compared=len(compared),
        scope=scope,
        true_norm=norms.reference(outcomes, apart.step) if apart is not None else None,
        wrong_norm=norms.wrong(outcomes, numbered) if apart is None else None,
    )


def _blamed(found: list[Disagreement], scope: NormScope) -> Iterator[Disagreement]:
    """No rank is at fault where every rank's norm leaves out the others' pieces."""
    for one in found:
        alike = scope.kind and one.what == GRADIENT_NORM
        yield replace(one, culprits=()) if alike else one


# ------------------------------------------------------------------------ one step


def _of_step(
    outcomes: Mapping[int, Outcome], step: int, compared: set[tuple[str, str]]
) -> Iterator[Disagreement]:
    """The disagreements, in the order in which a step produces them."""
    held = _held(outcomes, step)
    dtype = norms.dtype(outcomes)
    compared.update(key for key, by_rank in held.items() if len(by_rank) > 1)
    if step:
        yield from _tensors(GRADIENTS, step, held, {}, dtype)
        known = {r: n for r, o in outcomes.items() if (n := norms.of_step(o, step)) is not None}
        yield from _numbers(GRADIENT_NORM, step, known, NORM)
        counts = {
            r: o.replicas[str(step)].optimizer_steps[-1]
            for r, o in outcomes.items()
            if str(step) in o.replicas and o.replicas[str(step)].optimizer_steps
        }
        yield from _numbers(STEPS, step, counts, 0.0)
    rates = {
        r: o.replicas[str(step)].learning_rates
        for r, o in outcomes.items()
        if str(step) in o.replicas
    }
    for group in range(min((len(listed) for listed in rates.values()), default=0)):
        yield from _numbers(RATE, step, {r: rates[r][group] for r in rates}, SAME_RATE)
    yield from _tensors(OPTIMIZER_STATE, step, held, {}, dtype)
    before = _held(outcomes, 0) if step else {}
    yield from _tensors(WEIGHTS, step, held, before, dtype)


def _held(outcomes: Mapping[int, Outcome], step: int) -> Held:
    """(FQN, declared slice) -> rank -> what it holds."""
    held: dict[tuple[str, str], dict[int, Replica]] = {}
    for rank, outcome in sorted(outcomes.items()):
        facts = outcome.replicas.get(str(step))
        for fqn, replica in (facts.parameters if facts is not None else {}).items():
            held.setdefault((fqn, replica.slice), {})[rank] = replica
    return held


def _states(held: Held) -> Held:
    """("FQN exp_avg", slice) -> rank -> that tensor in place of the weight."""
    found: dict[tuple[str, str], dict[int, Replica]] = {}
    for (fqn, piece), by_rank in held.items():
        for rank, replica in by_rank.items():
            for name, tensor in replica.state.items():
                at = found.setdefault((f"{fqn} {name}", piece), {})
                at[rank] = replace(replica, weight=tensor, state={})
    return found


@dataclass(frozen=True, slots=True)
class _Measure:
    """Measures the distance between replicas of one kind in one step."""

    what: str
    dtype: str
    before: Held  # the weights before training
    largest: float  # norm of the largest gradient on any rank; far smaller ones are negligible

    def sides(
        self, key: tuple[str, str], by_rank: Mapping[int, Replica]
    ) -> tuple[list[list[int]], float]:
        """(groups of ranks that agree, the largest relative distance between any two groups). It
        is infinite where one has a gradient and another has none."""
        sides: list[list[int]] = []
        apart = 0.0
        for rank in by_rank:
            for side in sides:
                far = self._distance(key, by_rank, side[0], rank)
                if far is None:
                    side.append(rank)
                    break
                apart = max(apart, far)
            else:
                sides.append([rank])
        return sides, apart

    def _distance(
        self, key: tuple[str, str], by_rank: Mapping[int, Replica], a: int, b: int
    ) -> float | None:
        """The relative distance; None when equal within tolerance or nothing was sketched."""
        one, other = by_rank[a], by_rank[b]
        if self.what == GRADIENTS:
            if one.has_gradient != other.has_gradient:
                return math.inf
            x, y = one.gradient, other.gradient
        else:
            x, y = one.weight, other.weight
        if x is None or y is None or not x.projections or not y.projections:
            return None  # unknown, or not finite, which another verdict reports
        far, size = _apart(x, y), max(norms.size(x), norms.size(y))
        if self.what == GRADIENTS:
            allowed = REPLICA_GRADIENT.of(self.dtype) * size + 1e-7 * self.largest
            return far / size if far > allowed else None
        if self.what == OPTIMIZER_STATE:
            gradients = max(norms.size(one.gradient), norms.size(other.gradient))
            if gradients <= NOTHING * self.largest:
                return None
            return far / size if far > REPLICA_STATE.of(self.dtype) * size else None
        starts = self.before.get(key, {})
        moved = 0.0
        for rank, now in ((a, x), (b, y)):
            start = starts[rank].weight if rank in starts else None
            moved = max(moved, 0.0 if start is None else _apart(start, now))
        weight = REPLICA_WEIGHT.of(self.dtype) * size
        allowed = GRADIENT.of(self.dtype) * moved + weight
        return far / (moved or size) if far > allowed else None


def _tensors(what: str, step: int, held: Held, before: Held, dtype: str) -> Iterator[Disagreement]:
    """At most one disagreement for all parameters that differ; the worst one names its ranks."""
    gradients = (r.gradient for by_rank in held.values() for r in by_rank.values())
    measure = _Measure(what, dtype, before, max(map(norms.size, gradients), default=0.0))
    held = _states(held) if what == OPTIMIZER_STATE else held
    differ: list[tuple[float, str, str, list[list[int]]]] = []
    for (fqn, piece), by_rank in held.items():
        sides, apart = measure.sides((fqn, piece), by_rank)
        if len(sides) > 1:
            differ.append((apart, fqn, piece, sides))
    if not differ:
        return
    apart, worst, piece, sides = max(differ, key=lambda d: d[0])
    yield Disagreement(
        what,
        step,
        ranks=tuple(sorted(r for side in sides for r in side)),
        culprits=agreement.minority(sides),
        parameters=tuple(dict.fromkeys(fqn for _, fqn, _, _ in differ)),
        worst=worst,
        slice=piece,
        size=apart if math.isfinite(apart) else None,
    )


def _apart(x: Sketch, y: Sketch) -> float:
    """The estimated L2 distance between the two tensors."""
    squares = [(a - b) ** 2 for a, b in zip(x.projections, y.projections, strict=False)]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _numbers(
    what: str, step: int, values: Mapping[int, float], allowed: float
) -> Iterator[Disagreement]:
    """The disagreement where values differ by more than ``allowed``, relative."""
    finite = {rank: number(v) for rank, v in sorted(values.items())}
    known = all(map(math.isfinite, finite.values()))
    if known and agreement.apart(finite.values(), allowed):
        # Only ranks with equal numbers form one side: several close numbers are no majority.
        sides = agreement.sides({rank: f"{value:.6e}" for rank, value in finite.items()})
        culprits = agreement.minority(sides.values())
        yield Disagreement(what, step, tuple(finite), culprits, values=finite)
