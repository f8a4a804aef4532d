"""Every layout of some ranges: which there are, their order, and the page."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag.axes import Layout
from moediag.errors import ExitCode, UsageError
from moediag.lab.pipeline import check_request, check_sweep, check_sweep_page
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_result import CheckResult
from moediag.lab.pipeline.check_sweep import SweepResult, Word
from moediag.protocol import FAILS, MAY_FAIL, Checked, CheckFinding, MemoryTimeline, Traffic
from moediag.report import answer_views
from moediag.report.text_layout import plain
from tests.unit.pipeline.test_check import CHECKED, result
from tests.unit.pipeline.test_check_fit import GIB, LOSS, fit

SHARDS = CheckFinding("plan", MAY_FAIL, "an optimizer group is mixed")
HEADS = CheckFinding("plan", FAILS, "half a head on a rank")


def one(card: str = "", fails: bool = False, **axes: int) -> CheckResult:
    checked = dataclasses.replace(
        CHECKED, findings=[SHARDS, *([HEADS] if fails else [])],
        timeline=MemoryTimeline(traffic=[Traffic("tp", 2, 1, 4, 10**9 * sum(axes.values()))]),
    )  # fmt: skip
    found = fit(card, LOSS) if card else None
    return result(checked, layout=Layout(axes), ranks=Layout(axes).world_size, fit=found)


def swept(*results: CheckResult) -> SweepResult:
    rows = sorted(map(check_sweep.swept, results), key=check_sweep._place)
    return SweepResult("tp=1..8", results[0], tuple(rows), 12.0, Path("out"))


def page(found: SweepResult, details: bool = True) -> str:
    answer = check_sweep_page.answer(found, details)
    return "\n".join(plain(line) for line in answer_views.lines(answer, 200))


def test_a_range_doubles() -> None:
    assert check_sweep.parsed("dp_shard=2..9, tp=3", None) == [
        {"dp_shard": 2, "tp": 3}, {"dp_shard": 4, "tp": 3}, {"dp_shard": 8, "tp": 3}
    ]  # fmt: skip
    sixteen = check_sweep.parsed("dp_shard=2..16,ep=1..8,tp=1..2", 16)
    assert len(sixteen) == 7 and {"dp_shard": 16, "ep": 1, "tp": 1} in sixteen
    assert {Layout(layout).world_size for layout in sixteen} == {16}
    assert check_sweep.parsed("dp_shard=1..2", None) == [{"dp_shard": 2}]  # one rank is no layout


@pytest.mark.parametrize(
    "text",
    ["tp", "tp=", "tp=0", "tp=4..2", "tp=2,tp=4", "=2", "tp=a..b", "tp=-2", "tp=2...4", "tp=1"],
)
def test_ranges_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        check_sweep.parsed(text, None)


def test_too_many_layouts_and_none_are_refused() -> None:
    with pytest.raises(UsageError, match="has 196 layouts, more than 128"):
        check_sweep.parsed("dp_shard=8..512,ep=1..64,tp=1..8", None)
    assert len(check_sweep.parsed("dp_shard=8..512,ep=1..64,tp=1..8", 512)) == 22
    with pytest.raises(UsageError, match="no layout of 7 ranks"):
        check_sweep.parsed("dp_shard=8..512", 7)


def test_what_fits_comes_first_then_by_peak_or_by_the_wires() -> None:
    found = swept(
        one("26", tp=8), one("31", fails=True, tp=2), one("29", tp=4), one("31", dp_shard=4),
        result(Checked(problem="unknown"), layout=Layout({"ep": 2})),
    )  # fmt: skip
    words = [row.word for row in found.rows]
    assert words == [Word.FITS, Word.TIGHT, Word.UNDECIDED, Word.NO, Word.FAILS]
    assert [row.name for row in found.rows] == ["dp_shard=4", "tp=4", "ep=2", "tp=8", "tp=2"]
    assert found.state.exit_code == ExitCode.OK
    assert swept(one(fails=True, tp=2)).state.exit_code == ExitCode.FAILURE_FOUND
    assert swept(result(Checked(problem="?"))).state.exit_code == ExitCode.INCONCLUSIVE
    row = found.rows[0]
    assert (row.peak, row.sent, row.seconds) == (27 * GIB, 4 * 10**9 + 2040, None)
    late, soon = (dataclasses.replace(row, seconds=seconds) for seconds in (2.0, 1.0))
    assert sorted([late, soon], key=check_sweep._place) == [soon, late]


def test_the_page_has_the_best_layout_and_each_finding_once() -> None:
    text = page(
        swept(one("31", dp_shard=4), one("31", fails=True, tp=2), one("31", fails=True, tp=4))
    )
    assert "3 layouts in 12.0 s: 1 FITS, 2 FAILS" in text
    assert "--layout dp_shard=4: a rank holds 27.0 GiB, sends 4.0 GB a step" in text
    assert text.count("half a head on a rank") == 1 and "tp=2; tp=4: half a head" in text
    assert "every layout: an optimizer group is mixed" in text


def test_the_document_has_a_picture_of_the_peaks() -> None:
    found = swept(one("20", dp_shard=2), one("20", fails=True, tp=2))
    document = answer_views.html(check_sweep_page.answer(found))
    assert "peak of a rank in GiB, and the card" in document
    assert document.count('<rect class="bad"') == 2 and document.count('<rect class="tick"') == 1
    unknown = result(Checked(problem="unknown"), memory=None)
    unmeasured = check_sweep_page.answer(swept(unknown))
    assert '<svg class="chart"' not in answer_views.html(unmeasured)
    assert "peak of a rank" not in answer_views.markdown(check_sweep_page.answer(found))
    assert "peak of a rank" not in page(found)


def test_a_terminal_shows_the_first_layouts() -> None:
    many = swept(*(one("31", dp_shard=2**k) for k in range(1, 16)))
    assert "dp_shard=32768" not in page(many, details=False)
    assert "all 15 layouts: --details" in page(many, details=False)
    assert "dp_shard=32768" in page(many)


def test_layouts_with_the_same_axes_share_one_simulated_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    asked: list[tuple[str, bool]] = []
    measured: list[str] = []

    def answered(options: CheckOptions, *rest: Any) -> CheckResult:
        assert options.brief and options.batch == 1
        name = "x".join(str(n) for n in options.layout.values())
        asked.append((name, rest[-2] is None))
        measured.extend([name] if rest[-1] is None else [])
        problem = "refused" if name == "1x2" else ""
        timeline = MemoryTimeline([] if problem else [LOSS])
        checked = dataclasses.replace(CHECKED, problem=problem, timeline=timeline)
        return result(checked, layout=Layout(options.layout), ranks=2)

    monkeypatch.setattr(check_sweep, "answered", answered)
    stack = SimpleNamespace(versions={})
    monkeypatch.setattr(check_sweep.environment, "ensure", lambda *_: stack)
    monkeypatch.setattr(check_sweep, "launcher", lambda *_: contextlib.nullcontext())
    told: list[str] = []
    options = CheckOptions(str(config), {}, card="80", out=tmp_path / "out")
    found = check_sweep.sweep(
        "dp_shard=1..4,tp=1..4", options, lambda text, _: told.append(text)
    )  # fmt: skip
    # Nothing was simulated for 1x2, so the next one with tp alone is.
    assert asked == [("1x2", True), ("1x4", True), ("2x1", True), ("2x2", True), ("2x4", False),
                     ("4x1", False), ("4x2", False), ("4x4", False)]  # fmt: skip
    # Nor does the step on fake tensors depend on the number of data-parallel ranks.
    assert measured == ["1x2", "1x4", "2x1", "2x2", "2x4"]
    assert len(found.rows) == 8 and "layout 8 of 8" in told
    assert (tmp_path / "out" / "check.json").is_file()
    assert check_request.settings(config).families == ("llama",)
