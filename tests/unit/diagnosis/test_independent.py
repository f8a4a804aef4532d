"""Which divergences of one job are independent of the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moediag.diagnosis.blame.culprits import Blame, independent
from moediag.diagnosis.blame.nodes import explained
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Collective, Group
from tests.unit.evidence_builder import Job, Op


def divergence(
    kind: str, calls: Mapping[int, int | None], absent: tuple[int, ...] = ()
) -> Divergence:
    """``calls``: the index of each rank's call, None where it made none."""
    made = {
        rank: None if at is None else Collective(at, "g", 0, "all_reduce", 8, 8, "float32")
        for rank, at in calls.items()
    }
    return Divergence(kind, Group("g", tuple(calls)), 0, made, absent=absent)


def culprits(*candidates: Divergence, named: Mapping[int, tuple[int, ...]]) -> list[object]:
    """The culprits of what is independent; ``named``: by place among the candidates."""
    blames = {id(one): Blame(named.get(at, one.absent)) for at, one in enumerate(candidates)}
    return [found.culprits for _, found in independent(candidates, lambda one: blames[id(one)])]


FIRST = divergence("size", {4: 10, 5: 10})


def test_divergences_of_other_ranks_are_independent() -> None:
    other = divergence("op", {6: 12, 7: 12})
    assert culprits(FIRST, other, named={0: (4,), 1: ()}) == [(4,), ()]


def test_later_divergences_of_the_same_ranks_count_only_if_others_are_named_there() -> None:
    later = divergence("op", {5: 13, 7: 13})
    assert culprits(FIRST, later, named={0: (4,), 1: (7,)}) == [(4,), (7,)]
    assert culprits(FIRST, later, named={0: (4,), 1: (5,)}) == [(4,)]
    assert culprits(FIRST, later, named={0: (4,), 1: ()}) == [(4,)]


def test_each_absent_rank_is_found_once() -> None:
    one = divergence("missing", {0: 10, 1: None}, absent=(1,))
    same = divergence("missing", {2: 9, 1: None}, absent=(1,))
    other = divergence("missing", {0: 12, 3: None}, absent=(3,))
    assert culprits(one, same, other, named={}) == [(1,), (3,)]


def test_a_rank_after_its_own_unmatched_call_misses_nobody() -> None:
    """It counts otherwise than its peers from there on."""
    left = divergence("missing", {4: 14, 6: None}, absent=(6,))
    assert culprits(FIRST, left, named={0: (4,)}) == [(4,)]


def test_no_divergence_is_none() -> None:
    assert independent((), lambda one: Blame()) == ()


def test_a_rank_waits_for_one_that_is_gone_directly_or_through_others() -> None:
    pairs: dict[str, tuple[tuple[int, ...], str | None]] = {
        name: (members, "dp") for name, members in (("a", (0, 1)), ("b", (1, 2)), ("c", (2, 3)))
    }
    programs = [[Op("a")], [Op("b"), Op("a")], [Op("c"), Op("b")], [Op("c", peer=2)]]
    seen = Job(pairs, programs).whole()
    calls = {rank: one.collectives[0] for rank, one in seen.ranks.items()}
    assert explained(seen, {rank: calls[rank] for rank in (0, 1, 2)}, {3}) == {0, 1, 2}
    assert explained(seen, {rank: calls[rank] for rank in (0, 2)}, {3}) == {2}
    assert explained(seen, {0: calls[0], 3: calls[3]}, {3}) == set()  # it waits for rank 2 alone
    assert explained(seen, calls, set()) == set()
    unknown = {0: replace(calls[0], group="d"), 1: calls[1]}
    assert explained(seen, unknown, {1, 2}) == {1}
