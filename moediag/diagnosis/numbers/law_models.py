"""Parts of a model that no optimizer changes, and parameters that stages of a pipeline share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.evidence.law_model import NO_GRADIENT, LawCheck, ModelState
from moediag.evidence.model import Evidence
from moediag.records import dataclass

_ENOUGH = 3  # checked steps


@dataclass(frozen=True, slots=True)
class TiedApart:
    """Two parameters of different names that ranks had in common at first."""

    names: tuple[str, str]
    ranks: tuple[int, int]
    step: int
    """The first compared step in which they differ."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that may be deliberate."""

    buffers: tuple[str, ...] = ()
    """Buffers that never changed and that differ between ranks which average their gradients."""
    buffer_ranks: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Parameters with gradients that no optimizer has, and that never changed."""
    frozen_routers: tuple[str, ...] = ()
    averages: Mapping[int, int] | None = None
    """Rank -> updates of an averaged model, where these differ."""
    average_step: int = 0
    """The first compared step in which they differ."""
    tied: TiedApart | None = None


def model_facts(evidence: Evidence) -> ModelFacts:
    states = {
        rank: seen.laws.models
        for rank, seen in sorted(evidence.ranks.items())
        if seen.laws is not None and seen.laws.models
    }
    buffers, ranks = _buffers(states)
    averages, step = _averages(states)
    routers = {name: None for of in states.values() for s in of for name in s.frozen_routers}
    return ModelFacts(
        buffers, ranks, _left_out(states), tuple(routers), averages, step, _tied(evidence)
    )


_States = Mapping[int, tuple[ModelState, ...]]


def _buffers(states: _States) -> tuple[tuple[str, ...], tuple[int, ...]]:
    constant: dict[tuple[tuple[int, ...], str], dict[int, str]] = defaultdict(dict)
    for rank, of in states.items():
        seen: dict[tuple[tuple[int, ...], str], list[str | None]] = defaultdict(list)
        for state in of:
            for over, buffers in state.buffers:
                for name, value in buffers.items():
                    seen[over, name].append(value)
        for place, values in seen.items():
            if len(values) >= _ENOUGH and len(set(values)) == 1 and values[0] is not None:
                constant[place][rank] = values[0]
    found = {
        place: values
        for place, values in constant.items()
        if set(values) == set(place[0]) and len(set(values.values())) > 1
    }
    overs = [over for over, _ in found]
    return tuple(name for over, name in found if over == overs[0]), overs[0] if overs else ()


def _left_out(states: _States) -> tuple[str, ...]:
    found: set[str] = set()
    other: set[str] = set()
    for of in states.values():
        every = {name for state in of for name in state.left_out}
        for name in every:
            values = {state.left_out.get(name) for state in of}
            same = len(of) >= _ENOUGH and len(values) == 1 and None not in values
            (found if same else other).add(name)
    return tuple(sorted(found - other))


def _averages(states: _States) -> tuple[Mapping[int, int] | None, int]:
    of_steps: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, of in states.items():
        for state in of:
            of_steps[state.step][rank] = state.averages
    whole = {
        step: by_rank
        for step, by_rank in sorted(of_steps.items())
        if len(by_rank) == len(states) > 1 and len(set(map(len, by_rank.values()))) == 1
    }
    apart = [step for step, by_rank in whole.items() if len(set(by_rank.values())) > 1]
    if len(apart) < 2 or apart[-1] != max(whole):
        return None, 0
    last = whole[apart[-1]]
    one = next(at for at, row in enumerate(zip(*last.values(), strict=True)) if len(set(row)) > 1)
    return {rank: counts[one] for rank, counts in last.items()}, apart[0]


def _tied(evidence: Evidence) -> TiedApart | None:
    """Matrices that two stages of a pipeline had in common before the first update. More than one
    such pair may be stages that were initialised from the same seed."""
    checks = checks_of(evidence)
    firsts = {
        (rank, key): check
        for (key, _), by_rank in checks.items()
        for rank, check in by_rank.items()
        if check.count == 0
    }
    places: dict[tuple[str, str, str], list[tuple[int, str, int]]] = defaultdict(list)
    for (rank, key), check in firsts.items():
        for at, piece in enumerate(check.pieces):
            value = check.params[at]
            trains = check.grads[at] not in (None, NO_GRADIENT)
            if piece.shape.count("x") == 1 and value is not None and trains:
                places[value, piece.shape, piece.part].append((rank, key, at))
    shared: dict[tuple[str, str], list[tuple[tuple[int, str, int], tuple[int, str, int]]]]
    shared = defaultdict(list)
    held: dict[int, set[str]] = defaultdict(set)
    for rank, key in firsts:
        held[rank].add(key)
    for rows in places.values():
        by_key = {key: (rank, key, at) for rank, key, at in reversed(rows)}
        if len(by_key) == 2 and len(rows) == len({(rank, key) for rank, key, _ in rows}):
            one, two = sorted(by_key.values())
            if two[1] not in held[one[0]] and one[1] not in held[two[0]]:
                shared[one[1], two[1]].append((one, two))
    for pairs in shared.values():
        if len(pairs) == 1 and (step := _parted(checks, *pairs[0])):
            (rank, key, at), (other, other_key, other_at) = pairs[0]
            names = (
                firsts[rank, key].pieces[at].name,
                firsts[other, other_key].pieces[other_at].name,
            )
            return TiedApart(names, (rank, other), step)
    return None


def _parted(
    checks: Mapping[tuple[str, int], Mapping[int, LawCheck]],
    one: tuple[int, str, int],
    two: tuple[int, str, int],
) -> int:
    """The first step in which the two differ, or 0."""
    for key, step in checks:
        first = checks[key, step].get(one[0]) if key == one[1] else None
        second = checks.get((two[1], step), {}).get(two[0])
        if first is None or second is None or first.count != second.count:
            continue
        values = first.params[one[2]], second.params[two[2]]
        if None not in values and values[0] != values[1]:
            return step
    return 0
