"""A matrix that stages of a pipeline share, or some ranks of a job, stays the same on them."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law
from moediag.diagnosis.numbers.agreement import sides
from moediag.diagnosis.numbers.law_splits import Checks, checks_of
from moediag.evidence.law_model import NO_GRADIENT, PLAIN
from moediag.result.wording import listed, plural, ranks

_ENOUGH = 2  # steps
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


@law(suspects=True)
def expert_replicas_apart(facts: Facts) -> Findings:
    """Several sets of ranks began with matrices of their own, each the same on all ranks of a set,
    and they differ within the sets later, while those of all ranks stay equal."""
    rows: dict[str, dict[int, dict[int, str | None]]] = defaultdict(lambda: defaultdict(dict))
    for (key, step), by_rank in facts.of(checks_of).items():
        for rank, check in by_rank.items():
            for at, piece in enumerate(check.pieces if key == check.key else ()):
                if piece.how == PLAIN and piece.shape.count("x") >= 1:
                    rows[piece.name][step][rank] = check.params[at]
    kept, found = False, defaultdict[tuple[_Sets, int], list[str]](list)
    for name, steps in rows.items():
        sets, *later = (_sets(steps[step]) for step in sorted(steps))
        apart = [step for step, now in zip(sorted(steps)[1:], later, strict=True) if now != sets]
        if len(sets) == 1 and len(sets[0]) == facts.evidence.world_size:
            moved = len({value for row in steps.values() for value in row.values()}) > 1
            kept = kept or (moved and not apart)
        elif min(map(len, sets)) > 1 and len(apart) >= _ENOUGH:
            found[sets, apart[0]].append(name)
    for (sets, step), names in found.items() if kept else ():
        told = " and ".join(f"the same on {ranks(of)}" for of in sets[:4])
        yield Suspicious(
            f"{plural(len(names), 'parameter')} ({listed(names)}) began {told}, and "
            f"{'differ' if len(names) > 1 else 'differs'} within these sets since step {step}, "
            "while parameters of all ranks stay equal: if each set holds the same experts or "
            "shards, their gradients are added up over other ranks, or not at all.",
            tuple(names),
        )
        return


_Sets = tuple[tuple[int, ...], ...]


def _sets(row: dict[int, str | None]) -> _Sets:
    """The ranks with equal values."""
    return tuple(sorted(tuple(sorted(of)) for of in sides(row).values()))


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
