"""Tables that compare variants, and the rates of intermittent failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.lab.judgement import side_by_side
from moediag.lab.judgement.side_by_side import together
from moediag.result import Table, TrialResult
from tests.unit.trial_results import trial_result

NUMBERS = Table("Numbers", ("rank", "value"), (("rank 0", 1.0), ("rank 1", 2.0)), note="of x")
HELD = Table("Experts held by each rank, matched", ("rank", "after loading"), (("rank 0", "0-3"),))


def trial(variant: str, verdict: str = "clean", *tables: Table, repeat: int = 0) -> TrialResult:
    return trial_result(variant, "fix", verdict=verdict, tables=tables, repeat=repeat)


def test_a_table_of_one_variant_stays_with_its_trial() -> None:
    trials, tables = together([trial("a", "clean", NUMBERS), trial("b")])
    assert trials[0].tables == (NUMBERS,)
    assert tables == ()


def test_tables_of_several_variants_are_merged_into_one() -> None:
    other = replace(NUMBERS, rows=(("rank 0", 3.0),))
    trials, (table,) = together([trial("a", "clean", NUMBERS), trial("b", "hang", other)])
    assert all(t.tables == () for t in trials)
    assert table.columns == ("variant", "rank", "value")
    assert table.rows == (("a", "rank 0", 1.0), ("a", "rank 1", 2.0), ("b", "rank 0", 3.0))
    assert table.note == "of x"


def test_equal_tables_of_repeats_are_shown_once() -> None:
    same = [trial("a", "clean", NUMBERS, repeat=i) for i in range(3)]
    _, (table, rates) = together([*same, trial("b", "clean", NUMBERS)])
    assert len(table.rows) == 4
    assert rates.rows[0][:3] == ("a", "clean", "3 of 3")


def test_tables_with_different_columns_are_not_merged() -> None:
    other = Table("Numbers", ("rank", "bytes"), (("rank 0", 1),))
    trials, tables = together([trial("a", "clean", NUMBERS), trial("b", "clean", other)])
    assert tables == ()
    assert [t.tables for t in trials] == [(NUMBERS,), (other,)]


def test_expert_holders_are_shown_only_with_wrong_weights() -> None:
    fine = [trial("a", "clean", HELD), trial("b", "wrong-gradients", HELD)]
    trials, tables = together(fine)
    assert tables == ()
    assert all(t.tables == () for t in trials)
    _, (table,) = together([*fine, trial("c", "wrong-weights", HELD)])
    assert [row[0] for row in table.rows] == ["a", "b", "c"]


def test_rates_count_repeats_by_verdict() -> None:
    found = [
        trial("a", v, repeat=i) for i, v in enumerate(["nonfinite", "clean", "clean", "clean"])
    ]
    table = side_by_side.repeats_table([*found, trial("once")])
    assert table is not None
    assert table.title == "Verdicts over repeats"
    assert table.columns == ("variant", "verdict", "times", "95 % interval of its rate")
    assert table.rows == (
        ("a", "clean", "3 of 4", "30% to 95%"),
        ("a", "nonfinite", "1 of 4", "5% to 70%"),
    )
    assert side_by_side.repeats_table([trial("once"), trial("twice")]) is None


@pytest.mark.parametrize("of", [1, 4, 12, 400])
def test_the_interval_contains_the_rate_and_stays_within_0_and_1(of: int) -> None:
    for times in (0, of // 3, of):
        low, high = side_by_side.interval(times, of)
        assert 0 <= low <= times / of + 1e-12
        assert times / of - 1e-12 <= high <= 1
        assert high - low > 0


@pytest.mark.parametrize(
    ("times", "of", "low", "high"),
    [(1, 10, 0.0179, 0.4042), (5, 10, 0.2366, 0.7634), (0, 20, 0.0, 0.1611), (7, 7, 0.6457, 1.0)],
)
def test_the_interval_is_a_wilson_interval(times: int, of: int, low: float, high: float) -> None:
    assert side_by_side.interval(times, of) == pytest.approx((low, high), abs=1e-4)
