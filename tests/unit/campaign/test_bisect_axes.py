"""Who is to blame: all outcomes of the four corners, and ddmin against brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.campaign.bisect.probe_verdict import BAD, GOOD, Kind, ProbeVerdict, other, skip
from moediag.campaign.bisect.search.corners import (
    COMPANION_ONLY,
    NEW,
    OLD,
    PACKAGE_ONLY,
    Blame,
    Change,
    Corner,
    Corners,
    GuiltyAnswer,
    Reduction,
    applied,
    changes,
)

ELSE = other("crash:OSError")


def corners(
    old: ProbeVerdict, new: ProbeVerdict, package: ProbeVerdict, companion: ProbeVerdict
) -> Corners:
    told = {OLD: old, NEW: new, PACKAGE_ONLY: package, COMPANION_ONLY: companion}
    machine = Corners()
    while machine.answer is None:
        for corner in machine.next(1):
            machine.told(corner, told[corner])
    return machine


@pytest.mark.parametrize(
    ("package", "companion", "blame", "words"),
    [
        (True, False, Blame.PACKAGE, "transformers alone"),
        (False, True, Blame.COMPANION, "accelerate alone"),
        (True, True, Blame.EITHER, "either of transformers and accelerate"),
        (False, False, Blame.TOGETHER, "only transformers and accelerate together"),
    ],
)
@pytest.mark.parametrize(("old", "new"), [(GOOD, BAD), (BAD, GOOD)])
def test_four_answers_whichever_way_it_turned(
    old: ProbeVerdict,
    new: ProbeVerdict,
    package: bool,
    companion: bool,
    blame: Blame,
    words: str,
) -> None:
    turned = {True: new, False: old}
    answer = corners(old, new, turned[package], turned[companion]).answer
    assert answer is not None and answer.blame == blame and answer.turns == new.kind
    assert answer.words("transformers", "accelerate") == words


def test_what_decides_nothing_is_said() -> None:
    answer = corners(GOOD, BAD, ELSE, GOOD).answer
    assert answer is not None and answer.blame == Blame.UNDECIDED
    assert answer.words("transformers", "accelerate") == (
        "new transformers with old accelerate decided nothing (other (crash:OSError)); "
        "accelerate alone is not enough"
    )
    both = corners(GOOD, BAD, BAD, skip("no such pair")).answer
    assert both is not None and both.words("t", "a").startswith("t alone is enough; new a with")


@pytest.mark.parametrize(("old", "new"), [(GOOD, GOOD), (BAD, BAD), (ELSE, BAD), (GOOD, ELSE)])
def test_ends_that_do_not_differ(old: ProbeVerdict, new: ProbeVerdict) -> None:
    machine = corners(old, new, BAD, BAD)
    assert machine.answer is not None and machine.answer.blame == Blame.NO_CHANGE
    assert set(machine.known) == {OLD, NEW}, "nothing more is asked"
    assert "no change" in machine.answer.words("t", "a")


def test_all_corners_at_once() -> None:
    assert set(Corners().next(4)) == {Corner(a, b) for a in (False, True) for b in (False, True)}


# ------------------------------------------------------------------------ ddmin


class World:
    """BAD when one of the ``causes`` is contained; sets in which some of ``locked`` are but not all
    cannot be installed."""

    def __init__(self, causes: list[set[int]], locked: set[int] | None = None) -> None:
        self.causes = causes
        self.locked = locked or set()

    def __call__(self, chosen: frozenset[int]) -> ProbeVerdict:
        if self.locked & chosen and not self.locked <= chosen:
            return skip("cannot be resolved")
        return BAD if any(cause <= chosen for cause in self.causes) else GOOD


def reduce(count: int, world: World, jobs: int = 1) -> tuple[GuiltyAnswer, Reduction]:
    machine = Reduction(count)
    for _ in range(20 + 4 * count * count):
        if machine.answer is not None:
            break
        for question in machine.next(jobs):
            machine.told(question, world(question))
    assert machine.answer is not None
    return machine.answer, machine


SETS = st.integers(1, 16).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.sets(st.integers(0, n - 1), min_size=1, max_size=4), min_size=1, max_size=3),
        st.sets(st.integers(0, n - 1), max_size=3),
        st.integers(2, 6),
    )
)


@settings(max_examples=300, deadline=None)
@given(SETS)
def test_guilty_is_enough_and_nothing_can_be_left_out(
    case: tuple[int, list[set[int]], set[int], int],
) -> None:
    count, causes, locked, jobs = case
    world = World(causes, locked)
    answer, machine = reduce(count, world)
    guilty = frozenset(answer.guilty)
    assert not answer.problem and world(guilty).kind == Kind.BAD
    unsure = {i for i in guilty if not world(guilty - {i}).decided}
    assert set(answer.unsure) == (unsure if len(guilty) > 1 else set())
    assert all(world(guilty - {i}).kind != Kind.BAD for i in guilty)
    assert answer.minimal == (not answer.unsure)
    if len(causes) == 1 and not locked:
        assert guilty == causes[0]
    several, _ = reduce(count, world, jobs)
    assert several == answer
    resumed = Reduction(count)
    for question, verdict in random.Random(count).sample(
        sorted(machine.known.items(), key=str), len(machine.known)
    ):
        resumed.told(question, verdict)
    assert resumed.answer == answer


def test_two_causes_in_every_history_of_five_changes() -> None:
    """All pairs of causes over five changes, by brute force the set of minimal answers."""
    subsets = [set(s) for n in (1, 2, 3) for s in itertools.combinations(range(5), n)]
    for a, b in itertools.combinations(subsets, 2):
        answer, _ = reduce(5, World([a, b]))
        minimal = [s for s in (a, b) if not any(t < s for t in (a, b))]
        assert set(answer.guilty) in minimal and answer.minimal


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_one_culprit_takes_two_logarithms(count: int) -> None:
    for culprit in range(count):
        answer, machine = reduce(count, World([{culprit}]))
        assert answer == GuiltyAnswer((culprit,), True)
        assert len(machine.known) <= 2 + 2 * (count.bit_length() - 1)


def test_ends_that_are_not_what_they_should_be() -> None:
    answer, machine = reduce(4, World([set()]))
    assert not answer.guilty and "no change made: bad, not good" in answer.problem
    assert len(machine.known) == 1
    answer, _ = reduce(4, World([]))
    assert "every change made: good, not bad" in answer.problem
    nothing, _ = reduce(0, World([]))
    assert nothing.problem
    with pytest.raises(ValueError, match="of 4 changes"):
        Reduction(4).told(frozenset({4}), GOOD)
    with pytest.raises(ValueError, match="-1 changes"):
        Reduction(-1)


def test_what_changed_between_two_environments() -> None:
    old = ("accelerate==1.8.0", "numpy==2.0.0", "gone==1")
    new = ("accelerate==1.9.0", "numpy==2.0.0", "added==3")
    found = changes(old, new)
    assert found == (
        Change("accelerate", "1.8.0", "1.9.0"),
        Change("added", None, "3"),
        Change("gone", "1", None),
    )
    assert applied(old, found) == tuple(sorted(new))
    assert applied(old, ()) == tuple(sorted(old))
    assert applied(old, found[:1]) == ("accelerate==1.9.0", "gone==1", "numpy==2.0.0")
    with pytest.raises(ValueError, match="is not name==version"):
        changes(("torch",), ())
