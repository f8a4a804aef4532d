"""Process groups that one rank makes alone, with other members, in another order, or not."""

from __future__ import annotations

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Collective, Evidence, ExitStatus, Group, RankEvidence, Stall

Made = tuple[int, ...]
GROUPS = {
    "0": Group("0", (0, 1, 2, 3), desc="world", backend="gloo"),
    "new_group": Group("new_group", (0, 1, 2, 3), desc="all ranks", backend="gloo"),
}
REDUCE: Made = ()
FIRST, SECOND, ALL = (0, 1, 2), (1, 2), (0, 1, 2, 3)


def job(*made: list[Made], waits: bool = True) -> Evidence:
    """The groups that each rank makes; an empty one is an all-reduce of all. ``waits``: each rank
    waits in its last call, unless it makes a group without it."""
    ranks = {}
    for rank, own in enumerate(made):
        calls, count = [], {"0": 0, "new_group": 0}
        for index, members in enumerate(own):
            name = "new_group" if members else "0"
            open_ = waits and index == len(own) - 1 and (not members or rank in members)
            calls.append(
                Collective(
                    index, name, count[name], "new_group" if members else "all_reduce", 0, 0, "",
                    members=members or None, site=f"groups.py:{len(members) or 9} make",
                    time=float(index), completed=not open_,
                )
            )  # fmt: skip
            count[name] += 1
        exit_ = ExitStatus(signal="SIGKILL", by_us=True) if waits else ExitStatus(0)
        ranks[rank] = RankEvidence(rank, tuple(calls), GROUPS, exit=exit_, finished=not waits,
                                   versions={"torch": "2.13.0"})  # fmt: skip
    stall = Stall(9.0, 3.0, tuple(ranks)) if waits else None
    return Evidence(len(made), ranks, backend="gloo", stall=stall, watched=True)


USUAL = [REDUCE, FIRST, SECOND, REDUCE]


@pytest.mark.parametrize(
    ("odd", "others", "culprits", "words"),
    [
        # Rank 3 makes one alone, and the others reduce.
        ([REDUCE, ALL], [REDUCE, REDUCE], (3,), "rank 3 is in new_group of ranks 0..3"),
        ([REDUCE, (2, 3)], [REDUCE, REDUCE], (3,), "rank 3 is in new_group of ranks 2, 3"),
        # With other members, or in another order.
        ([REDUCE, (2, 3)], [REDUCE, ALL], (3,), "ranks 0..2 are in new_group of ranks 0..3"),
        ([REDUCE, (2, 3), ALL], [REDUCE, ALL], (3,), "the members of a new group differ"),
        # It leaves one out.
        ([REDUCE, REDUCE], [REDUCE, ALL], (3,), "rank 3 is in all_reduce"),
    ],
)
def test_a_rank_that_departs_is_named(
    odd: list[Made], others: list[Made], culprits: Made, words: str
) -> None:
    found = diagnose(job(others, others, others, odd))
    assert (found.verdict, found.culprits) == ("hang", culprits), found.cause
    assert words.lower() in found.cause.lower()


def test_who_is_no_member_and_went_on_agrees_with_those_that_wait() -> None:
    waits = [REDUCE, FIRST]
    found = diagnose(job(waits, waits, [REDUCE, REDUCE], [REDUCE, FIRST, REDUCE]))
    assert found.culprits == (2,), found.cause


def test_two_against_two_names_nobody_and_shows_both_lines() -> None:
    one, two = [REDUCE, (0, 1, 2, 3)], [REDUCE, (2, 3, 0)]
    found = diagnose(job(one, one, two, two))
    assert found.culprits == ()
    assert "groups.py:4" in found.cause and "groups.py:3" in found.cause


def test_jobs_that_end_and_groups_side_by_side_are_no_failure() -> None:
    alone = [[REDUCE, (rank,), REDUCE] for rank in range(4)]
    assert diagnose(job(*alone, waits=False)).verdict == "clean"
    assert diagnose(job(*[USUAL] * 4, waits=False)).verdict == "clean"
    # Rank 0 made one for itself, which nobody waits for.
    more = [[REDUCE, (0,), REDUCE], *[[REDUCE, REDUCE]] * 3]
    assert diagnose(job(*more, waits=False)).verdict == "clean"


def test_without_a_record_of_the_groups_nobody_is_named() -> None:
    found = diagnose(job([REDUCE, ALL], *[[REDUCE]] * 3))
    assert not set(found.culprits) & {0}
