"""Tonight against the nights before: new, fixed, still failing since when, flaky."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.lab.campaign.nightly.blame import span
from moediag.lab.campaign.nightly.changes import Change, Compared, compare
from moediag.lab.campaign.nightly.night import Entry, Night
from tests.unit.nightly_nights import entry, night

CHANGES = ("4.0.0", "4.1.0", "4.2.0", "4.3.0", "4.4.0", "4.5.0")


def last(*entries: Entry, window: int = 7) -> Compared:
    """The comparison of the last of these nights, each with one entry."""
    nights = [night(day + 1, e) for day, e in enumerate(entries)]
    (found,) = compare(nights[-1], nights[:-1], window)
    return found


def history(states: str) -> list[Entry]:
    """``gbu``: a night each, each on a release of its own."""
    names = {"g": "good", "b": "bad", "u": "unknown"}
    return [entry(names[s], version) for s, version in zip(states, CHANGES, strict=False)]


@pytest.mark.parametrize(
    ("states", "change", "since", "last_good"),
    [
        ("b", Change.NEW, None, None),
        ("g", Change.SAME, None, None),
        ("gb", Change.NEW, None, 1),
        ("gub", Change.NEW, None, 1),
        ("gbb", Change.STILL, 2, 1),
        ("gbub", Change.STILL, 2, 1),
        ("gbbb", Change.STILL, 2, 1),
        ("bb", Change.STILL, 1, None),
        ("bgbb", Change.STILL, 3, 2),
        ("gbg", Change.FIXED, 2, 1),
        ("bbg", Change.FIXED, 1, None),
        ("bug", Change.FIXED, 1, None),
        ("bgg", Change.SAME, None, 2),
        ("gu", Change.UNKNOWN, None, None),
        ("u", Change.UNKNOWN, None, None),
    ],
)
def test_a_sequence_of_nights_is_classified(
    states: str, change: Change, since: int | None, last_good: int | None
) -> None:
    found = last(*history(states))
    assert found.change == change
    assert (int(found.since.night[8:10]) if found.since else None) == since
    if change in (Change.NEW, Change.STILL, Change.FIXED):
        assert (int(found.last_good.night[8:10]) if found.last_good else None) == last_good


def test_another_failure_is_new_even_after_a_failure() -> None:
    good, one, other = history("gbb")
    found = last(good, one, entry(version=other.stack["transformers"], signature="hang:other"))
    assert found.change == Change.NEW
    assert found.before is not None
    assert found.before.entry.signature != found.entry.signature


def test_contradicting_verdicts_on_one_stack_are_flaky() -> None:
    found = last(entry("good"), entry("bad"))
    assert found.change == Change.FLAKY
    assert [seen.entry.verdict for seen in found.outcomes] == ["clean", "hang"]
    assert last(entry("bad"), entry("good")).change == Change.FLAKY


def test_flaky_ends_with_the_window() -> None:
    rows = [entry("good"), entry("bad"), entry("bad"), entry("bad")]
    assert last(*rows, window=4).change == Change.FLAKY
    assert last(*rows, window=3).change == Change.STILL


@pytest.mark.parametrize("what", [{"stack": {"transformers": "9.9"}}, {}])
def test_another_stack_or_moediag_version_is_not_flaky(what: dict[str, Any]) -> None:
    earlier = night(1, entry("good", **what), moediag_version="1.0" if what else "0.9")
    (found,) = compare(night(2, entry("bad")), [earlier])
    assert found.change == Change.NEW


def test_other_lanes_and_later_nights_are_ignored() -> None:
    others = [night(1, entry("good", "4.0"), lane="gpu-8"), night(3, entry("good", "4.0"))]
    (found,) = compare(night(2, entry("bad")), others)
    assert (found.change, found.last_good) == (Change.NEW, None)


@given(st.lists(st.sampled_from("gbu"), min_size=1, max_size=6), st.randoms())
def test_the_comparison_does_not_depend_on_the_order_of_files(
    states: list[str], random: Any
) -> None:
    nights = [night(d + 1, e) for d, e in enumerate(history("".join(states)))]
    earlier: list[Night] = nights[:-1]
    shuffled = random.sample(earlier, len(earlier))
    assert compare(nights[-1], earlier) == compare(nights[-1], shuffled)
    (found,) = compare(nights[-1], earlier)
    allowed = {
        "g": {Change.SAME, Change.FIXED},
        "b": {Change.NEW, Change.STILL},
        "u": {Change.UNKNOWN},
    }
    assert found.change in allowed[states[-1]]


# ------------------------------------------------------------------------ bisect range


def test_the_bisect_starts_from_the_last_good_release() -> None:
    found = span(last(entry("good", "4.57.6"), entry("bad", "5.0.0")))
    assert (found.package, found.good, found.bad, found.why_not) == (
        "transformers", "4.57.6", "5.0.0", "",
    )  # fmt: skip


def test_only_a_single_changed_companion_is_bisected() -> None:
    torch = {**entry().stack, "torch": "2.12.0+cpu"}
    found = span(last(entry("good", stack=torch), entry("bad")))
    assert (found.package, found.good, found.bad) == ("torch", "2.12.0", "2.13.0")
    both = {**torch, "accelerate": "1.0.0"}
    found = span(last(entry("good", stack=both), entry("bad")))
    assert "several packages differ (accelerate, torch)" in found.why_not


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([entry("bad")], "no night before was good"),
        ([entry("good", "4.0", role="fix"), entry("bad", role="fix")], "a fix began to fail"),
        ([entry("good", "4.0"), entry("bad", verdict="clean")], "no longer shows"),
        ([entry("good", stack={}), entry("bad")], "no version differs"),
    ],
)
def test_a_missing_bisect_has_a_reason(rows: list[Entry], why: str) -> None:
    assert why in span(last(*rows)).why_not
