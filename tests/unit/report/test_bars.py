"""Bars beside numbers: a longer bar is a larger number, and a missing number has no bar."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.report import html
from moediag.report.bars import WIDTH, error_bar, time_bar
from moediag.report.page import FixRow, page_of
from moediag.result import read_result
from tests.unit.trial_results import changed, trial_result

EFFECTS = read_result(Path(__file__).parents[2] / "golden" / "results" / "hang.json")
ROW = FixRow("a", "correct", "clean", "", False, "", ())
TRIAL = trial_result("a", "fix", gradient_error=1e-6, parameters_compared=3)


def length(svg: str) -> float:
    return float(re.findall(r'<rect class="(?:time|good|bad)" width="([\d.]+)"', svg)[0])


def test_time_bars_are_proportional_and_mark_the_unfixed_step() -> None:
    rows = [replace(ROW, ratio=r) for r in (1.0, 2.0, None, math.nan)]
    assert length(time_bar(2.0, rows)) == WIDTH
    assert length(time_bar(1.0, rows)) == WIDTH / 2
    assert f'x1="{WIDTH / 2:.1f}"' in time_bar(2.0, rows)
    assert [time_bar(r, rows) for r in (None, math.nan, math.inf, 0.0)] == [""] * 4


def test_error_bars_are_logarithmic() -> None:
    bars = [error_bar(changed(TRIAL, gradient_error=e)) for e in (0.0, 1e-8, 1e-4, 1.0, 1e9)]
    lengths = [length(bar) for bar in bars]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == WIDTH
    assert length(error_bar(changed(TRIAL, gradient_error=math.nan))) == WIDTH
    assert 'class="bad"' in error_bar(changed(TRIAL, verdict="wrong-gradients"))


@pytest.mark.parametrize("more", [{"gradient_error": None}, {"parameters_compared": 0}])
def test_values_not_compared_have_no_bar(more: dict[str, object]) -> None:
    assert error_bar(changed(TRIAL, **more)) == ""  # type: ignore[arg-type]


def test_the_page_shows_bars_beside_the_numbers() -> None:
    page = html.render([EFFECTS])
    measured = [row for row in page_of(EFFECTS).fixes if row.ratio is not None]
    assert measured and page.count("of the unfixed step time") == len(measured)
