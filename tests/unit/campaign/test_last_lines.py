"""The last eight lines of a terminal tell verdict, what, where, why and what to do next."""

from __future__ import annotations

import dataclasses

import pytest

from moediag.lab.campaign.bisect import answer_page
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.search.search import Options
from moediag.lab.campaign.hunt import findings_page
from moediag.lab.campaign.matrix import table_page
from moediag.lab.campaign.matrix.cells import Cell
from moediag.lab.campaign.nightly import summary
from moediag.lab.campaign.nightly.changes import compare
from moediag.lab.campaign.nightly.summary import Summary
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result.answer_blocks import Answer
from tests.unit.campaign import test_bisect_timeline, test_hunt
from tests.unit.campaign.test_matrix_cells import S, table
from tests.unit.nightly_nights import entry, night

REPORT = test_bisect_timeline.report("GGBBGG", Options(3, window=True))
TONIGHT = night(2, entry(why="rank 1 left out its experts"))
CELLS = (Cell(S, "1.0", "clean", False), Cell(S, "1.1", "hang", True))
FOUND = test_hunt.found(test_hunt.cell("alpha", "padding", test_hunt.WRONG))


def last(page: Answer) -> list[str]:
    """As a terminal shows them, without the line of the report."""
    return [plain(line) for line in answer_views.lines(page, 80)][-7:]


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (
            findings_page.answer(FOUND),
            ["HUNT     failure found", "WHAT     padding (left): 1 of 2", "WHERE    alpha",
             "WHY      it should hold", "NEXT     moediag hunt --release 5.0.0 --family alpha"],
        ),
        (
            table_page.answer(table(*CELLS)),
            ["MATRIX   answered", "WHAT     starve mixtral: hang", "WHERE    lib 1.1",
             "NEXT     moediag bisect starve --package lib --good 1.0 --bad 1.1"],
        ),
        (
            answer_page.answer(
                dataclasses.replace(REPORT, beyond={"began": Beyond(compare="https://x/compare")})
            ),
            ["BISECT   answered: transformers 4.2.0 is the first bad", "WHAT     expert-starvation",
             "WHERE    All changes: https://x/compare", "SURE     Confidence high"],
        ),
        (
            summary.answer(Summary(TONIGHT, compare(TONIGHT, [night(1, entry("good", "4.0"))]))),
            ["NIGHTLY  failure found", "WHAT     starve · unfixed", "WHERE    transformers 5.0.0",
             "WHY      rank 1 left out its experts", "NEXT     moediag run starve"],
        ),
    ],
    ids=["hunt", "matrix", "bisect", "nightly"],
)  # fmt: skip
def test_they_tell_the_answer(page: Answer, told: list[str]) -> None:
    lines = "\n".join(last(page))
    for text in told:
        assert f" {text}" in lines
    heads = [line.split()[0] for line in lines.splitlines() if line[:2].strip() and line[0] == " "]
    assert heads[-1] == "NEXT"


def test_nothing_is_said_of_what_was_not_found() -> None:
    healthy = test_hunt.found(test_hunt.cell("alpha", "padding", test_hunt.HOLDS))
    page = findings_page.answer(dataclasses.replace(healthy, relations={"padding": "x"}))
    assert page.rows == () and page.state.exit_code == 0
    none = table(Cell(S, "1.0", "clean", False))
    assert [row.label for row in table_page.answer(none).rows] == []
