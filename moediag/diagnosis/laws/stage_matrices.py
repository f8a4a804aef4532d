"""A matrix that stages of a pipeline share stays the same on both."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law
from moediag.diagnosis.numbers.law_splits import Checks, checks_of
from moediag.evidence.law_model import NO_GRADIENT

_Place = tuple[int, str, int]  # rank, key of the optimizer, position among its pieces


@law(suspects=True)
def stage_matrices_apart(facts: Facts) -> Findings:
    """Matrices that two stages of a pipeline had in common before the first update differ later."""
    # More than one such pair may be stages that were initialised from the same seed.
    checks = facts.of(checks_of)
    firsts = {
        (rank, key): check
        for (key, _), by_rank in checks.items()
        for rank, check in by_rank.items()
        if check.count == 0 and check.optimizer
    }
    places: dict[tuple[str, str, str], list[_Place]] = defaultdict(list)
    held: dict[int, set[str]] = defaultdict(set)
    for (rank, key), check in firsts.items():
        held[rank].add(key)
        for at, piece in enumerate(check.pieces):
            value = check.params[at]
            trains = check.grads[at] not in (None, NO_GRADIENT)
            if piece.shape.count("x") == 1 and value is not None and trains:
                places[value, piece.shape, piece.part].append((rank, key, at))
    shared: dict[tuple[str, str], list[tuple[_Place, _Place]]] = defaultdict(list)
    for rows in places.values():
        by_key = {key: (rank, key, at) for rank, key, at in reversed(rows)}
        if len(by_key) == 2 and len(rows) == len({(rank, key) for rank, key, _ in rows}):
            one, two = sorted(by_key.values())
            if two[1] not in held[one[0]] and one[1] not in held[two[0]]:
                shared[one[1], two[1]].append((one, two))
    for pairs in shared.values():
        if len(pairs) == 1 and (step := _parted(checks, *pairs[0])):
            named = (
                f"{firsts[rank, key].pieces[at].name} on rank {rank}" for rank, key, at in pairs[0]
            )
            yield Suspicious(
                f"{' and '.join(named)} had the same values before the first update and differ "
                f"since step {step}: if pipeline stages share this matrix, nothing adds up their "
                "gradients."
            )
            return


def _parted(checks: Checks, one: _Place, two: _Place) -> int:
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
