"""Tables measured by a program, merged from all ranks."""

from __future__ import annotations

import dataclasses

from moediag.diagnosis.words.trial_tables import tables
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import Outcome, OutcomeTable


def evidence(*of_ranks: list[OutcomeTable]) -> Evidence:
    ranks = {
        rank: RankEvidence(rank=rank, outcome=Outcome(rank=rank, tables=found))
        for rank, found in enumerate(of_ranks)
    }
    return Evidence(world_size=len(ranks), ranks=ranks)


def table(*rows: list[object], title: str = "t", note: str = "") -> OutcomeTable:
    return OutcomeTable(title, ["name", "value"], [list(row) for row in rows], note)


def test_rows_of_several_ranks_are_sorted_by_name() -> None:
    (found,) = tables(evidence([table(["a", 1], ["c", 3], note="n")], [table(["b", 2.5])]))
    assert found.rows == (("a", 1), ("b", 2.5), ("c", 3))
    assert (found.columns, found.note) == (("name", "value"), "n")


def test_equal_rows_are_merged_and_keep_their_order() -> None:
    same = [table([2, None], [1, "x"])]
    (found,) = tables(evidence(same, same))
    assert found.rows == ((2, None), (1, "x"))


def test_tables_are_separate_by_title_and_empty_ones_are_omitted() -> None:
    found = tables(evidence([table(["a", 1]), table(["b", 2], title="u")], [table(title="v")]))
    assert [t.title for t in found] == ["t", "u"]
    assert tables(evidence([], [])) == ()


def test_a_rank_that_died_has_no_table() -> None:
    whole = evidence([table(["a", 1])], [table(["b", 2])])
    died = dataclasses.replace(whole.ranks[1], outcome=None)
    lost = dataclasses.replace(whole, ranks={**whole.ranks, 1: died})
    assert [t.rows for t in tables(lost)] == [(("a", 1),)]
