"""Whether ranks that average their gradients trained on the same samples."""

from __future__ import annotations

from collections import defaultdict

from moediag.evidence.law_model import ModelInputs, SameOrder
from moediag.evidence.model import Evidence
from moediag.records import dataclass

_ENOUGH = 2  # steps; one may be equal by chance, such as a warm-up
_CONSTANT = 3  # steps with the same values


@dataclass(frozen=True, slots=True)
class SharedSamples:
    """Ranks whose model was called with the same values in every compared step."""

    ranks: tuple[int, ...]
    over: tuple[int, ...]
    """The ranks that average their gradients."""
    steps: tuple[int, ...]
    first: ModelInputs
    same_part: bool
    """All of them asked a DistributedSampler for the same part, of several."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    shared: SharedSamples | None = None
    constant: tuple[int, ...] = ()
    """Ranks whose model was called with the same values in all checked steps."""
    same_order: SameOrder | None = None
    order_ranks: tuple[int, ...] = ()
    """Ranks that got it."""


Steps = dict[int, tuple[ModelInputs, ...]]  # the calls of each step


def sample_facts(evidence: Evidence) -> SampleFacts:
    found: dict[int, Steps] = {}
    orders: dict[int, SameOrder] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        if seen.laws is None:
            continue
        orders.update((rank, one) for one in seen.laws.same_order[:1])
        steps: dict[int, list[ModelInputs]] = defaultdict(list)
        for one in seen.laws.inputs:
            steps[one.step].append(one)
        found[rank] = {step: tuple(calls) for step, calls in steps.items()}
    constant = tuple(rank for rank, steps in found.items() if _constant(steps))
    return SampleFacts(
        shared=_shared(found, constant),
        constant=constant,
        same_order=next(iter(orders.values()), None),
        order_ranks=tuple(orders),
    )


def _constant(steps: Steps) -> bool:
    every = [tuple(call.digest for call in calls) for calls in steps.values()]
    return len(every) >= _CONSTANT and len(set(every)) == 1


def _shared(found: dict[int, Steps], constant: tuple[int, ...]) -> SharedSamples | None:
    """The largest side of ranks with the same samples. Constant inputs say nothing: they are made
    up, as in a benchmark."""
    overs = {c.over for steps in found.values() for calls in steps.values() for c in calls}
    best: SharedSamples | None = None
    for over in sorted(overs):
        if len(over) < 2 or not set(over) <= found.keys() or set(over) & set(constant):
            continue
        common = set.intersection(*(set(found[rank]) for rank in over))
        steps = tuple(sorted(s for s in common if len({len(found[rank][s]) for rank in over}) == 1))
        if len(steps) < _ENOUGH:
            continue
        sides: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in over:
            sides[tuple(c.digest for s in steps for c in found[rank][s])].append(rank)
        _, ranks = max((len(side), tuple(side)) for side in sides.values())
        digests = {tuple(c.digest for c in found[ranks[0]][s]) for s in steps}
        if len(ranks) < 2 or len(digests) < 2 or (best and len(best.ranks) >= len(ranks)):
            continue
        firsts = [found[rank][steps[0]][0] for rank in ranks]
        parts = {(one.replicas, one.number) for one in firsts}
        same = len(parts) == 1 and firsts[0].replicas > 1
        best = SharedSamples(ranks, over, steps, firsts[0], same)
    return best
