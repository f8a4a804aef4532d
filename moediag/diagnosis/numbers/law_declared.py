"""Whether tensors that a program declares to be equal on several ranks are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite

from moediag.evidence.law_model import DeclaredTensor
from moediag.evidence.model import Evidence
from moediag.records import dataclass

_ENOUGH = 2  # steps
_LARGE = 0.2  # of the norm; no rounding makes such a difference


@dataclass(frozen=True, slots=True)
class DeclaredApart:
    """A tensor that differs between ranks in every compared step."""

    first: DeclaredTensor
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    size: float = 0.0
    """The difference as a part of the norm; 0 for integers."""


@dataclass(frozen=True, slots=True)
class DeclaredFacts:
    inputs: DeclaredApart | None = None
    """Integers that the model itself was called with."""
    others: DeclaredApart | None = None
    """Floats that differ by more than rounding."""


# Step -> rank -> the tensors that were declared then, in order.
_Steps = Mapping[int, Mapping[int, Sequence[DeclaredTensor]]]


def declared_facts(evidence: Evidence) -> DeclaredFacts:
    given = _given(evidence)
    inputs: list[DeclaredApart] = []
    others: list[DeclaredApart] = []
    for ranks, steps in _by_ranks(evidence).items():
        whole = {
            step: by_rank
            for step, by_rank in steps.items()
            if set(by_rank) == set(ranks) and _alike(list(by_rank.values()))
        }
        inputs += _inputs(ranks, whole, given)
        others += _others(ranks, whole)
    return DeclaredFacts(next(iter(inputs), None), next(iter(others), None))


def _given(evidence: Evidence) -> dict[tuple[int, int], set[str]]:
    """(rank, step) -> fingerprints of the tensors that models were called with."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank, seen in evidence.ranks.items():
        for one in seen.laws.inputs if seen.laws is not None else ():
            found[rank, one.step] |= set(one.digest.split("-"))
    return found


def _by_ranks(evidence: Evidence) -> dict[tuple[int, ...], _Steps]:
    """Tensors on ranks that no axis of data parallelism connects."""
    found: dict[tuple[int, ...], dict[int, dict[int, list[DeclaredTensor]]]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        for one in seen.laws.declared if seen.laws is not None else ():
            if not one.data and rank in one.ranks:
                steps = found.setdefault(one.ranks, {})
                steps.setdefault(one.step, {}).setdefault(rank, []).append(one)
    return dict(found)


def _alike(rows: Sequence[Sequence[DeclaredTensor]]) -> bool:
    """Whether the ranks declared the same tensors in the same order."""
    return len({tuple((one.part, one.shape, one.axes) for one in row) for row in rows}) == 1


def _inputs(
    ranks: tuple[int, ...], steps: _Steps, given: Mapping[tuple[int, int], set[str]]
) -> list[DeclaredApart]:
    compared: list[int] = []
    apart: dict[int, DeclaredTensor] = {}
    for step, by_rank in sorted(steps.items()):
        for row in zip(*(by_rank[rank] for rank in ranks), strict=True):
            digests = [one.digest for one in row]
            if all(
                digest is not None and digest in given.get((rank, step), ())
                for rank, digest in zip(ranks, digests, strict=True)
            ):
                compared.append(step)
                if len(set(digests)) > 1:
                    apart.setdefault(step, row[0])
    if len(apart) < _ENOUGH or set(compared) != set(apart):
        return []
    return [DeclaredApart(next(iter(apart.values())), ranks, tuple(apart))]


def _others(ranks: tuple[int, ...], steps: _Steps) -> list[DeclaredApart]:
    """The first tensor of a step that differs much, in every step."""
    apart: dict[int, tuple[DeclaredTensor, float]] = {}
    for step, by_rank in sorted(steps.items()):
        for row in zip(*(by_rank[rank] for rank in ranks), strict=True):
            sketches = [one.sketch for one in row if one.sketch is not None]
            if len(sketches) == len(row) and (size := _difference(sketches)) > _LARGE:
                apart.setdefault(step, (row[0], size))
    if len(apart) < _ENOUGH or set(apart) != set(steps):
        return []
    first, size = next(iter(apart.values()))
    return [DeclaredApart(first, ranks, tuple(apart), size)]


def _difference(sketches: Sequence[tuple[float, float]]) -> float:
    """About the norm of the largest difference, as a part of the norm."""
    totals, norms = [total for total, _ in sketches], [norm for _, norm in sketches]
    most = max(norms)
    found = max(max(totals) - min(totals), most - min(norms)) / most if most else 0.0
    return found if isfinite(found) else 0.0
