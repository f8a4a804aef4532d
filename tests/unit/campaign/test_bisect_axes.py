"""Blame of the package or its companions: all outcomes of the four corners."""

from __future__ import annotations

import pytest

from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, ProbeVerdict, other, skip
from moediag.lab.campaign.bisect.search.corners import (
    COMPANION_ONLY,
    NEW,
    OLD,
    PACKAGE_ONLY,
    Blame,
    Change,
    Corner,
    Corners,
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
def test_corners_decide_who_is_to_blame(
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


def test_undecided_corners_are_reported() -> None:
    answer = corners(GOOD, BAD, ELSE, GOOD).answer
    assert answer is not None and answer.blame == Blame.UNDECIDED
    assert answer.words("transformers", "accelerate") == (
        "new transformers with old accelerate decided nothing (other (crash:OSError)); "
        "accelerate alone is not enough"
    )
    both = corners(GOOD, BAD, BAD, skip("no such pair")).answer
    assert both is not None and both.words("t", "a").startswith("t alone is enough; new a with")


@pytest.mark.parametrize(("old", "new"), [(GOOD, GOOD), (BAD, BAD), (ELSE, BAD), (GOOD, ELSE)])
def test_equal_ends_show_no_change(old: ProbeVerdict, new: ProbeVerdict) -> None:
    machine = corners(old, new, BAD, BAD)
    assert machine.answer is not None and machine.answer.blame == Blame.NO_CHANGE
    assert set(machine.known) == {OLD, NEW}, "nothing more is asked"
    assert "no change" in machine.answer.words("t", "a")


def test_all_corners_can_be_probed_at_once() -> None:
    assert set(Corners().next(4)) == {Corner(a, b) for a in (False, True) for b in (False, True)}


def test_changes_between_two_environments_are_listed() -> None:
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
