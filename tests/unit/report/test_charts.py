"""Charts: what is larger is longer or darker, and a missing number has none."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moediag.report import html
from moediag.report.charts.bars import WIDTH, error_bar, time_bar
from moediag.report.charts.error_map import error_map, share
from moediag.report.charts.token_map import label, token_map
from moediag.report.charts.wait_lanes import state, wait_lane
from moediag.report.page import FixRow, page_of
from moediag.result import (
    ExpertTokens,
    LayerError,
    RankState,
    RunResult,
    TimedCall,
    TimedRank,
    read_result,
    wording,
)
from tests.unit.trial_results import changed, trial_result

GOLDEN = Path(__file__).parents[2] / "golden" / "results"
EFFECTS = read_result(GOLDEN / "hang.json")
ROW = FixRow("a", "correct", "clean", "", False, "", ())
TRIAL = trial_result("a", "fix", gradient_error=1e-6, parameters_compared=3)


def length(svg: str) -> float:
    return float(re.findall(r'<rect class="(?:time|good|bad)" width="([\d.]+)"', svg)[0])


def test_time_bars_are_proportional_and_mark_the_unfixed_step() -> None:
    rows = [replace(ROW, ratio=r) for r in (1.0, 2.0, None, math.nan, math.inf, 0.0)]
    bars = [time_bar(row, rows) for row in rows]
    assert [length(bar) for bar in bars[:2]] == [WIDTH / 2, WIDTH]
    assert f'x1="{WIDTH / 2:.1f}"' in bars[1]
    assert bars[2:] == [""] * 4


def test_time_bars_show_quartiles_within_the_scale() -> None:
    row = replace(ROW, ratio=1.0, spread=(0.5, 2.0))
    bar = time_bar(row, [row])
    assert f'd="M{WIDTH / 4:.1f} 3v6m0-3H{WIDTH:.1f}m0-3v6"' in bar
    assert "spread" not in time_bar(replace(row, spread=None), [row])


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


# -- tokens per expert -----------------------------------------------------------------


def cells(markup: str, kind: str) -> int:
    return sum(rect.get("class") == kind for rect in ElementTree.fromstring(markup).iter("rect"))


def test_an_expert_without_a_token_is_dashed_and_named() -> None:
    tokens = ExpertTokens("mlp", 1, ((0,), (1,)), ((4, 9, 0), (3, 2, 1)))
    chart = token_map(tokens)
    assert (cells(chart, "none"), cells(chart, "heat")) == (1, 5)
    assert label(tokens) == "Tokens per expert: rank 0 sent none to expert 2"


def test_even_tokens_have_no_dashed_cell() -> None:
    tokens = ExpertTokens("mlp", 1, ((0,), (1,)), ((4, 4), (4, 4)))
    assert cells(token_map(tokens), "none") == 0
    assert "every rank sent some" in label(tokens)


def test_a_row_of_several_ranks_says_that_some_of_them_sent_none() -> None:
    tokens = ExpertTokens("mlp", 1, ((0, 1, 2),), ((0, 4),))
    assert "some of ranks 0..2 sent none to expert 0" in label(tokens)


def test_charts_without_numbers_are_empty() -> None:
    assert cells(token_map(ExpertTokens("mlp", 1, (), ())), "heat") == 0
    assert cells(error_map(()), "bad") == 0
    assert state(TimedRank((0,), (), None)) == "made no call"


# -- gradient errors -------------------------------------------------------------------


def test_wrong_parts_are_red_and_named() -> None:
    errors = [
        LayerError("layer 10", "experts", 8, 3, 1e-2, 1.0),
        LayerError("layer 2", "experts", 8, 0, 0.0, 1.0),
        LayerError("", "all others", 3, 1, math.nan, 1.0),
    ]
    chart = error_map(errors)
    assert (cells(chart, "bad"), cells(chart, "good")) == (2, 1)
    texts = [text.text for text in ElementTree.fromstring(chart).iter("text")]
    assert [t for t in texts if t in ("layer 2", "layer 10", "others")] == [
        "layer 2", "layer 10", "others",
    ]  # fmt: skip
    assert ElementTree.fromstring(chart).get("aria-label") == (
        "Wrong gradients by layer and part: experts of layer 10, all others"
    )
    assert share(errors[1]) < share(errors[0]) < share(errors[2]) == 1.0


# -- who waits where -------------------------------------------------------------------


def test_the_timeline_shows_who_waits_and_who_made_no_call() -> None:
    waits = TimedRank((0, 2), (TimedCall("a", 0.0, "done"), TimedCall("b", 0.1, "open")), 1)
    gone = TimedRank((1,), (TimedCall("a", 0.2, "done"),), None)
    rows = (waits, gone)
    assert state(waits) == "did not complete b"
    assert state(TimedRank((3,), waits.calls[:1], 0)) == "completed a"
    assert state(gone) == "made no call after a"
    assert [cells(wait_lane(waits, rows), kind) for kind in ("open", "done", "gone")] == [1, 1, 0]
    assert [cells(wait_lane(gone, rows), kind) for kind in ("open", "done", "gone")] == [0, 0, 1]


# -- the page --------------------------------------------------------------------------


def of_many_ranks(ranks: int) -> RunResult:
    """A hang with all that a page may show, of a large job."""
    tokens = ExpertTokens("mlp", 1, ((7,), *((r, r + 32) for r in range(31))), ((3,) * 256,) * 32)
    calls = tuple(TimedCall("all_gather of a" * 4, i / 9, "done") for i in range(6))
    trial = trial_result(
        verdict="hang", expected="", world_size=ranks, culprits=(7,),
        victims=tuple(r for r in range(ranks) if r != 7),
        states=(
            RankState("waiting", "waiting in all_gather on world", tuple(range(7))),
            RankState("elsewhere", "in no operation", tuple(range(7, ranks))),
        ),
        tokens=tokens,
        layer_errors=tuple(
            LayerError(f"layer {n}", part, 384, n % 2, 1e-3, 1.0)
            for n in range(94) for part in ("experts", "router", "inputs of the MoE blocks")
        ),
        timeline=tuple(TimedRank(tuple(range(r, ranks, 6)), calls, 3) for r in range(6)),
        stacks={r: ("wait (train.py:3)", f"step (train.py:{r})") for r in range(ranks)},
    )  # fmt: skip
    return replace(EFFECTS, trials=(trial,))


def test_a_page_of_1024_ranks_is_small() -> None:
    assert len(html.render([of_many_ranks(1024)])) < 1_500_000


def test_long_lists_of_ranks_are_folded() -> None:
    assert html.rank_list((0, 2, 3, 4)) == "ranks 0, 2..4"
    folded = ElementTree.fromstring(html.rank_list(range(0, 1024, 6)))
    assert str(folded[0].text).startswith("ranks 0, 6, 12, 18, 24, 30")
    assert str(folded[0].text).endswith("78 … (171 ranks)")
    assert folded[0].tail == wording.ranks(range(0, 1024, 6))
