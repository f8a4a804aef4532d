"""Which rank is behind, from messages of NCCL's watchdogs alone; nobody is named on a guess."""

from __future__ import annotations

from typing import Any

import pytest

from moediag.diagnosis.schedules.log_positions import Positions, positions
from moediag.evidence.model import Report


def at(rank: int | None, seq: int, op: str = "all_reduce", size: int = 8, **more: Any) -> Report:
    """A timeout."""
    values = {"group": "0", "desc": "default_pg", "place": rank} | more
    return Report("timeout", rank, seq=seq, op=op, numel_in=size, numel_out=size, **values)


def has(rank: int, issued: int, completed: int | None, **more: Any) -> Report:
    """A dump signal."""
    values = {"group": "0", "desc": "default_pg", "place": rank} | more
    return Report("signal", rank, issued=issued, completed=completed, **values)


def found(*reports: Report) -> Positions:
    result = positions(reports)
    assert result is not None
    return result


def named(*reports: Report) -> tuple[tuple[int, ...], tuple[int, ...]]:
    result = found(*reports)
    return result.culprits, result.victims


def test_equal_numbers_name_nobody() -> None:
    assert named(at(0, 9), at(1, 9), at(2, 9)) == ((), ())


def test_a_rank_in_an_earlier_call_is_behind() -> None:
    assert named(at(0, 9), at(1, 9), at(2, 8)) == ((2,), (0, 1))


def test_a_rank_that_did_not_issue_the_call_is_behind() -> None:
    assert named(at(0, 9), at(1, 9), has(2, 8, 8)) == ((2,), (0, 1))
    assert named(at(0, 9), has(2, 0, 0)) == ((2,), (0,))


def test_a_rank_that_waits_in_a_call_without_which_others_went_on_is_not_named() -> None:
    assert named(at(0, 9), at(1, 9), at(2, 7)) == ((), ())
    assert named(at(0, 9), at(1, 9), at(2, 7), has(3, 6, 6))[0] == (3,)


def test_several_ranks_are_behind() -> None:
    assert named(at(0, 9), at(1, 8), has(2, 8, 8), has(3, 7, 7)) == ((1, 2, 3), (0,))


def test_a_rank_that_issued_the_call_is_not_behind() -> None:
    assert named(at(0, 9), at(1, 9), has(2, 11, 8)) == ((), ())
    assert named(at(0, 9), has(2, 9, None)) == ((), ())


def test_a_rank_that_completed_the_call_is_told_and_not_named() -> None:
    result = found(at(0, 9), has(1, 12, 12))
    assert result.culprits == () and [one.rank for one in result.groups[0].ahead] == [1]


def test_without_an_open_call_nobody_is_behind() -> None:
    assert named(has(0, 9, 9), has(1, 8, 8)) == ((), ())


def test_a_rank_that_waits_in_another_group_is_a_victim() -> None:
    """Rank 2 is missing in the group of all, because it waits for rank 3 in theirs."""
    theirs = {"group": "4", "desc": "pp"}
    result = found(
        at(0, 9), at(1, 9), has(2, 8, 8), at(2, 5, **theirs | {"place": 0}),
        has(3, 4, 4, **theirs | {"place": 1}),
    )  # fmt: skip
    assert (result.culprits, result.victims) == ((3,), (0, 1, 2))
    assert result.elsewhere == {2: "pp"}


def test_ranks_that_wait_for_each_other_in_two_groups_are_not_named() -> None:
    a, b = {"group": "1", "desc": "a"}, {"group": "2", "desc": "b"}
    assert named(
        at(0, 9, **a), has(1, 8, 8, **a), at(1, 6, **b), has(0, 5, 5, **b)
    ) == ((), ())  # fmt: skip


def test_in_a_broadcast_the_rank_that_is_missing_may_not_be_seen() -> None:
    assert named(at(0, 9), at(1, 8, op="broadcast")) == ((), ())
    assert named(at(0, 9), at(1, 8, op="all_gather")) == ((1,), (0,))


@pytest.mark.parametrize(
    "reports",
    [
        # The group is not named.
        [at(None, 9, group="", desc="", place=0), at(None, 8, group="", desc="", place=1)],
        # Sends are counted apart.
        [at(0, 9), at(1, 8, op="send")],
        # Two ranks with the same rank in the group: two groups of one name.
        [at(0, 9, group="3", desc="tp", place=0), at(2, 8, group="3", desc="tp", place=0)],
        # A device mesh may give disjoint groups one name.
        [
            at(0, 9, group="3", desc="mesh_tp", place=0),
            at(3, 8, group="3", desc="mesh_tp", place=1),
        ],
        # Rank 1 was restarted.
        [at(0, 9), has(1, 9, 8), has(1, 3, 2)],
        # Ten minutes lie between: two attempts.
        [at(0, 9, time=9000.0, seconds=600.0), at(1, 8, time=9640.0, seconds=600.0)],
        # Two processes are rank 1: a trainer and an inference engine, say.
        [at(0, 9, process="a"), at(1, 9, process="b"), has(1, 8, 8, process="c")],
    ],
)
def test_numbers_that_may_not_belong_together_are_not_compared(reports: list[Report]) -> None:
    result = found(*reports)
    assert result.culprits == () and result.groups[0].apart


def test_ranks_in_a_group_are_not_ranks_of_the_job() -> None:
    theirs = {"group": "3", "desc": "tp"}
    result = found(at(None, 9, **theirs | {"place": 0}), at(None, 8, **theirs | {"place": 1}))
    assert result.culprits == () and [one.place for one in result.groups[0].behind] == [1]


def test_different_calls_with_one_number_are_a_mismatch() -> None:
    (group,) = found(at(0, 9), at(1, 9, op="all_gather")).groups
    assert len(group.odd) == 2
    assert named(at(0, 9), at(1, 9, size=16)) == ((), ())
    assert named(*(at(rank, 9) for rank in range(3)), at(3, 9, size=16))[0] == (3,)
    assert named(*(at(rank, 9) for rank in range(3)), at(3, 9, size=9), at(4, 9, size=7))[0] == ()


def test_the_first_of_several_open_calls_counts() -> None:
    (group,) = found(at(0, 11), at(0, 9), at(1, 9)).groups
    assert group.front == 9 and not group.behind


def test_writers_that_are_not_known_are_kept_apart() -> None:
    unknown = [at(None, 9, group="", desc="", place=place) for place in (None, 3, 0)]
    (group,) = found(*unknown).groups
    assert [one.place for one in group.members] == [None, 0, 3]


def test_other_messages_give_no_position() -> None:
    assert positions([Report("stuck", 3), Report("machine")]) is None
