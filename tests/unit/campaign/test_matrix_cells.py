"""Cells of a matrix and its table."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from moediag.lab.campaign.bisect.probe_verdict import (
    BAD,
    GOOD,
    Kind,
    ProbeVerdict,
    flaky,
    other,
    skip,
)
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.matrix import table_page
from moediag.lab.campaign.matrix.cells import Cell, Matrix, of_probe
from moediag.protocol import build
from moediag.report import answer_views
from moediag.report.text_layout import plain

STARVED = "collective-mismatch:size reduce_scatter:one-rank"
CRASH = "crash:TypeError:fsdp_utils.py fsdp2_prepare_model:several-ranks"


@pytest.mark.parametrize(
    ("verdict", "signature", "expected"),
    [
        (ProbeVerdict(Kind.BAD, STARVED), STARVED, ("collective-mismatch", True, "x")),
        (BAD, STARVED, ("collective-mismatch", True, "x")),
        (GOOD, "clean", ("clean", False, ".")),
        (other(CRASH), CRASH, ("crash", None, "crash")),
        (skip("not-applicable: no mixtral"), "not-applicable", ("not-applicable", None, "")),
        (skip("the control c is not clean (nonfinite:no-rank)"), "nonfinite:no-rank",
         ("inconclusive", None, "~")),
        (skip("tokenizers has no wheel"), "", ("could-not-run", None, "!")),
        (skip("it cannot be imported: x"), "crash:ImportError:x.py f:one-rank",
         ("could-not-run", None, "!")),
        (flaky(1, 1), f"{STARVED}; clean", ("flaky", None, "flaky")),
    ],
)  # fmt: skip
def test_a_probe_becomes_a_cell(
    verdict: ProbeVerdict, signature: str, expected: tuple[str, bool | None, str]
) -> None:
    found = of_probe("s f", ProbeRecord("4.53.0", verdict, signature=signature), "abc")
    assert (found.verdict, found.shows, found.mark) == expected
    assert build(Cell, json.loads(json.dumps(asdict(found)))) == found


def test_the_declared_verdict_without_its_pattern_is_another_failure() -> None:
    lost = "wrong-weights:one-slice-sharded-again:no-rank"
    record = ProbeRecord("5.19.0", ProbeVerdict(Kind.BAD, lost), signature=lost)
    assert of_probe("s f", record, "", "one-slice-sharded-again").shows is True
    found = of_probe("s f", record, "", "not-loaded")
    assert (found.shows, found.mark, found.text) == (None, "wrong-weights", lost)


def test_the_legend_shows_the_expected_failure_once_or_by_scenario() -> None:
    one = table(Cell(S, "1.0", "hang", True))
    assert ("x", "the failure shows (hang)") in table_page.legend(one)
    names = {"a f": ("hang",), "b f": ("wrong-weights:not-sharded", "nonfinite")}
    cells = {c.key: c for c in [Cell("a f", "1.0", "hang", True)]}
    both = Matrix("lib", tuple(names), ("1.0",), cells, names)
    shown = "the failure shows (a hang, b wrong-weights:not-sharded or nonfinite)"
    assert ("x", shown) in table_page.legend(both)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"version": "1.0", "verdict": "clean"},
        {"subject": "s", "version": "one", "verdict": "clean"},
        {"subject": "s", "version": "1.0", "verdict": "clean", "shows": "yes"},
        {"subject": "s", "version": "1.0", "verdict": "clean", "seconds": "1"},
    ],
)
def test_an_invalid_cell_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        build(Cell, raw)


# ------------------------------------------------------------------------ the table

S, T = "starve mixtral", "starve olmoe"


def table(*cells: Cell, versions: tuple[str, ...] = ("1.0", "1.1", "1.2", "2.0"),
          listed: tuple[str, ...] = ()) -> Matrix:  # fmt: skip
    return Matrix(
        "lib", (S, T), versions, {c.key: c for c in cells}, {S: ("hang",), T: ("hang",)}, listed
    )


def test_marks_and_reasons_of_cells() -> None:
    found = table(
        Cell(S, "1.0", "hang", True), Cell(S, "1.1", "clean", False),
        Cell(S, "1.2", "could-not-run", None, "no wheel"),
        Cell(T, "1.0", "not-applicable", None, "no olmoe"),
    )  # fmt: skip
    assert [found.mark(S, v) for v in found.versions] == ["x", ".", "!", "?"]
    assert found.mark(T, "1.0") == ""
    assert found.missing == 1 + 3
    text = "\n".join(plain(line) for line in answer_views.lines(table_page.answer(found), 100))
    assert "1.2, starve mixtral: could not be run: no wheel" in text
    assert len(table_page.to_json(found)["cells"]) == 4


def test_affected_releases_are_shown_as_ranges() -> None:
    marks = {"1.0": False, "1.1": True, "1.2": None, "1.3": True, "1.4": False, "2.0": True}
    cells = [
        Cell(S, v, "could-not-run" if shows is None else "v", shows) for v, shows in marks.items()
    ]
    found = table(*cells, versions=tuple(marks), listed=(*marks, "1.1.1", "1.4.1"))
    assert found.stretches(S) == [("1.1", "1.3"), ("2.0", "2.0")]
    told = dict(table_page.found(found))
    assert told["mixtral"] == "1.1 to 1.3, 2.0 (1 release before it not tried)"
    assert told["olmoe"] == "nothing is known"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_table_wider_than_the_screen_is_split(width: int) -> None:
    subjects = tuple(f"starve family_{number}" for number in range(12))
    found = Matrix("lib", subjects, ("1.0",), {})
    text = [plain(line) for line in answer_views.lines(table_page.answer(found), width)]
    assert max(map(len, text)) <= width
    assert sum(line.count("family_") for line in text if "nothing" not in line) == 12
    assert sum(line.startswith("   1.0") for line in text) >= 12 * 11 // width


def test_columns_are_named_by_what_differs() -> None:
    assert table_page.heads(table()) == ["mixtral", "olmoe"]
    scenarios = Matrix("lib", ("a qwen3_moe", "b qwen3_moe"), (), {})
    assert table_page.heads(scenarios) == ["a", "b"]
    both = Matrix("lib", ("a qwen3_moe", "b mixtral"), (), {})
    assert table_page.heads(both) == ["a qwen3_moe", "b mixtral"]


def test_markdown_contains_the_legend() -> None:
    found = table(Cell(S, "1.0", "hang", True))
    text = answer_views.markdown(table_page.answer(found))
    assert text.splitlines()[0] == "## starve by release of lib"
    assert "| 1.0 | x | ? |" in text
    assert "? was not run" in text and r"\~" not in text
