"""Cells keep the significant digits; tables fit any terminal and can be pasted into a pull
request."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.errors import EvidenceError
from moediag.report import html, json_view, junit, markdown, tables, views
from moediag.report.page import page_of
from moediag.report.terminal import as_text
from moediag.report.text_layout import plain
from moediag.result import Cell, RunResult, Table, TrialResult, read_result
from tests.unit.trial_results import changed

RESULTS = Path(__file__).parent.parent.parent / "golden" / "results"
OWNERS = Table(
    "experts per rank", ("rank", "before", "after"), ((0, "0..3", "0, 1"), (1, "4..7", "2, 3"))
)


@pytest.fixture
def starvation() -> RunResult:
    return read_result(RESULTS / "starvation.json")


def text(table: Table, width: int = 100) -> str:
    return "\n".join(plain(line) for line in tables.lines(table, width))


def with_tables(result: RunResult, variant: str, *shown: Table) -> RunResult:
    trials = (changed(t, tables=shown) if t.variant == variant else t for t in result.trials)
    return replace(result, trials=tuple(trials))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"),
        (0, "0"),
        (15696, "15,696"),
        (-1000, "-1,000"),
        (True, "yes"),
        (False, "no"),
        (0.0, "0"),
        (-0.0, "0"),
        (5.545177459716797, "5.545177"),
        (784.1, "784.1"),
        (1234567.0, "1,234,567"),
        (1.1920929e-07, "1.192093e-07"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("two\nlines", "two lines"),
        ("", ""),
    ],
)
def test_cells_are_formatted(value: Cell, written: str) -> None:
    assert tables.cell(value) == written


def test_floats_of_a_column_have_the_same_decimals() -> None:
    losses = (5.545177, 5.26002, 62.03125, 5.125, 0.0, 4.7e-07)
    times = (1.5, 784.0, 40.0, 2.0, 3.0, 4.0)
    rows = tuple((loss, ms, "x") for loss, ms in zip(losses, times, strict=True))
    grid = tables.grid(Table("t", ("loss", "ms", "kind"), rows))
    assert [row[0] for row in grid.rows] == [
        "5.545177", "5.260020", "62.03125", "5.125000", "0.000000", "4.7e-07",
    ]  # fmt: skip
    assert [row[1] for row in grid.rows] == ["1.5", "784.0", "40.0", "2.0", "3.0", "4.0"]


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_a_float_keeps_seven_digits_in_any_column(values: list[float]) -> None:
    grid = tables.grid(Table("t", ("x",), tuple((value,) for value in values)))
    for value, (written,) in zip(values, grid.rows, strict=True):
        assert float(written.replace(",", "")) == float(f"{value:.7g}")


def test_numbers_are_right_aligned() -> None:
    rows = ((1, None, "a", None, True), (2, "nan", "b", None, False), (3, 1.5, 2, None, None))
    grid = tables.grid(Table("t", ("rank", "norm", "mixed", "empty", "yes"), rows))
    assert grid.right == (True, True, False, False, False)


def test_table_is_laid_out_as_text() -> None:
    assert text(replace(OWNERS, note="of 8")) == (
        " TABLE    experts per rank\n"
        "          rank  before  after\n"
        "          ----  ------  -----\n"
        "             0  0..3    0, 1\n"
        "             1  4..7    2, 3\n"
        "          of 8"
    )


def test_headers_are_wrapped_first_and_bottom_aligned() -> None:
    columns = ("name of the parameter", "largest difference from the reference")
    table = Table("t", columns, (("model.layers.0.self_attn.q_proj.weight", 1.5),))
    assert text(table, 60).splitlines()[1:] == [
        "                                                     largest",
        "                                             difference from",
        "   name of the parameter                       the reference",
        "   --------------------------------------  -----------------",
        "   model.layers.0.self_attn.q_proj.weight                1.5",
    ]
    assert text(table, 40).splitlines()[-2:] == [
        "   model.layers.0.self_attn.         1.5",
        "   q_proj.weight",
    ]


def test_columns_that_do_not_fit_become_a_list() -> None:
    columns = tuple(f"norm of rank {rank}" for rank in range(12))
    shown = text(Table("t", columns, (tuple(3.380820 + rank for rank in range(12)),)), 60)
    assert "   norm of rank 0: 3.38082\n      norm of rank 1: 4.38082\n" in shown


def test_long_tables_are_truncated_with_a_count() -> None:
    table = Table("t", ("rank", "elements"), tuple((rank, 1000 + rank) for rank in range(512)))
    for shown in (text(table), tables.markdown(table)):
        assert "1,063" in shown
        assert "1,064" not in shown
        assert "and 448 more rows" in shown
    assert "1,064" in text(replace(table, rows=table.rows[:65]))
    assert "more row" not in text(replace(table, rows=table.rows[:65]))


def test_a_table_without_rows_shows_a_message() -> None:
    assert text(Table("t", ("a", "b"), ())).endswith("no rows")


cells = st.none() | st.integers() | st.floats() | st.booleans() | st.text(max_size=90)
words = st.text(st.sampled_from("abc def./"), max_size=40)


@settings(deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(40, 120))
def test_no_line_is_wider_than_the_terminal(data: st.DataObject, count: int, width: int) -> None:
    columns = tuple(data.draw(words) for _ in range(count))
    rows = data.draw(st.lists(st.tuples(*[cells] * count), max_size=4))
    table = Table("a title " * 9, columns, tuple(rows), "a note " * 20)
    assert all(len(plain(line)) <= width for line in tables.lines(table, width))


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("abcdefgh./"), max_size=60), min_size=3, max_size=3),
       st.integers(43, 100))  # fmt: skip
def test_no_character_of_a_cell_is_lost(words: list[str], width: int) -> None:
    shown = text(Table("t", ("A", "B", "C"), (tuple(words),)), width)
    body = "".join(shown.split("-\n", 1)[1].split())
    assert sorted(body) == sorted("".join(words))


def test_markdown_cells_are_escaped() -> None:
    nasty = "a | b\n*c* ~d~ <script> `e`"
    shown = tables.markdown(Table(nasty, ("rank", nasty), ((0, nasty), (1, None)), nasty))
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert rows[1] == "|---:|---|"
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [3, 3, 3, 3]
    assert "<script" not in shown
    assert rows[3] == "| 1 | - |"
    assert shown.startswith("**a \\| b")


def test_a_row_with_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' has 2 columns and a row of 1"):
        Table("t", ("a", "b"), ((1,),))
    with pytest.raises(ValueError, match="'t' has no columns"):
        Table("t", (), ())
    with pytest.raises(ValueError, match="'t' has a cell of type list"):
        Table("t", ("a",), (([1],),))  # type: ignore[arg-type]


# -- in results ------------------------------------------------------------------------


def test_tables_round_trip_through_a_result(starvation: RunResult, tmp_path: Path) -> None:
    table = Table("t", ("a", "b", "c"), ((1, 1.5, None), ("x", True, 1e-300)), "note")
    result = replace(with_tables(starvation, "unfixed", table, OWNERS), tables=(table,))
    result.write(tmp_path)
    assert read_result(tmp_path) == result
    assert json.loads(json_view.render(result))["tables"][0]["rows"][0] == [1, 1.5, None]


def test_an_older_result_has_no_tables(tmp_path: Path) -> None:
    raw = json.loads((RESULTS / "starvation.json").read_text())
    assert "tables" not in raw and "tables" not in raw["trials"][0]
    result = read_result(RESULTS / "starvation.json")
    assert (result.tables, result.trials[0].tables, result.schema_version) == ((), (), 1)


def test_fields_of_a_newer_moediag_are_ignored(tmp_path: Path) -> None:
    raw = json.loads((RESULTS / "starvation.json").read_text())
    raw["of_tomorrow"] = raw["trials"][0]["of_tomorrow"] = 1
    (tmp_path / "result.json").write_text(json.dumps(raw))
    assert read_result(tmp_path) == read_result(RESULTS / "starvation.json")


def test_a_broken_table_in_a_file_is_an_error(tmp_path: Path) -> None:
    raw = json.loads((RESULTS / "starvation.json").read_text())
    raw["tables"] = [{"title": "t", "columns": ["a", "b"], "rows": [[1]]}]
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(EvidenceError, match="2 columns and a row of 1"):
        views.load(tmp_path)


@pytest.mark.parametrize("variant", ["unfixed", "touch", "identical-batches"])
def test_every_view_shows_the_tables_of_every_trial(starvation: RunResult, variant: str) -> None:
    bare, result = starvation, with_tables(starvation, variant, OWNERS)
    for view in (
        lambda r: as_text(page_of(r), 80),
        lambda r: markdown.render([r]),
        lambda r: html.render([r]),
        lambda r: junit.render([r]),
    ):
        assert OWNERS.title not in view(bare)
        assert OWNERS.title in view(result)
        assert "4..7" in view(result)


def test_a_clean_trial_shows_its_title_and_tables_but_no_finding(starvation: RunResult) -> None:
    page = page_of(with_tables(starvation, "touch", OWNERS))
    assert [finding.title[1] for finding in page.findings] == ["unfixed"]
    assert [finding.title[1] for finding in page.tabled] == ["touch"]
    assert as_text(page, 120).count("confidence") == as_text(page_of(starvation), 120).count(
        "confidence"
    )


def test_tables_of_the_run_precede_the_fixes_in_a_terminal(starvation: RunResult) -> None:
    shown = as_text(page_of(replace(starvation, tables=(OWNERS,))), 80)
    assert shown.index("CAUSE") < shown.index(OWNERS.title) < shown.index("FIXES")


def test_tables_of_the_run_are_in_the_junit_suite(starvation: RunResult) -> None:
    (suite,) = ElementTree.fromstring(junit.render([replace(starvation, tables=(OWNERS,))]))
    assert OWNERS.title in str(suite.findtext("system-out"))
    assert OWNERS.title not in str(suite[0].findtext("system-out"))


def test_tables_of_a_finding_are_outside_its_fence(starvation: RunResult) -> None:
    shown = markdown.render([with_tables(starvation, "unfixed", OWNERS)])
    fenced = "".join(re.findall(r"(?ms)^```text$.*?^```$", shown))
    assert "FIRST DIVERGENCE" in fenced
    assert OWNERS.title not in fenced
    assert "\n\n| rank | before | after |\n|---:|---|---|\n| 0 | 0..3 | 0, 1 |\n" in shown


def test_a_long_table_is_folded_in_markdown(starvation: RunResult) -> None:
    long = Table("long", ("rank",), tuple((rank,) for rank in range(markdown.MOST_OPEN + 1)))
    short = replace(long, title="short", rows=long.rows[:-1])
    shown = markdown.render([replace(starvation, tables=(short, long))])
    assert "**short**" in shown
    assert "<summary>long</summary>" in shown


def test_markdown_counts_the_tables_it_left_out(starvation: RunResult) -> None:
    result = replace(starvation, tables=(OWNERS, replace(OWNERS, note="x" * 3000)))
    shown = markdown.render([result], limit=len(markdown.render([starvation])) + 500)
    assert "1 table and 1 finding left out here" in shown
    assert shown.count(OWNERS.title) == 1


def repeats(*tables_of_each: tuple[Table, ...]) -> list[TrialResult]:
    trial = read_result(RESULTS / "starvation.json").trials[0]
    return [changed(trial, repeat=i, tables=each) for i, each in enumerate(tables_of_each)]


def test_equal_tables_of_repeats_are_shown_once() -> None:
    other = replace(OWNERS, rows=OWNERS.rows[:1])
    nan = Table("n", ("x",), ((float("nan"),),))
    again = Table("n", ("x",), ((float("nan"),),))
    assert tables.of_repeats(repeats((OWNERS, nan), (OWNERS, again))) == (OWNERS, nan)
    titles = [table.title for table in tables.of_repeats(repeats((OWNERS,), (other,), (OWNERS,)))]
    assert titles == ["experts per rank", "experts per rank (repeat 2)"]
