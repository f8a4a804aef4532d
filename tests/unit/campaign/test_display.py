"""The display of a campaign: each event once, the remaining time, and nothing on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moediag.lab.campaign.engine import shown
from moediag.lab.campaign.engine.display import Line, Lines, Live, Pace
from moediag.lab.campaign.run import outcome
from moediag.lab.pipeline.observer import glance
from moediag.lab.pipeline.trials import _telling
from moediag.launch.settings import Progress
from moediag.result import TrialResult, read_result

RESULTS = Path(__file__).parent.parent.parent / "golden" / "results"


@pytest.fixture
def hang() -> TrialResult:
    return read_result(RESULTS / "hang.json").trials[0]


def moment(doing: str) -> Progress:
    return Progress(
        doing, {0: "in-collective", 1: "running", 2: "in-collective"}, {0: 2, 1: 1}, 4.0
    )


def test_lines_report_each_event_once(hang: TrialResult) -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.begin("expert-starvation-hang: 4 trials", 4)
    for step in range(10):
        lines.stack("transformers 4.53.2", "installing", step / 10)
    lines.begun("unfixed")
    tell = _telling(lines, "unfixed")
    for doing in ("launching", "running", "running", "capturing", "capturing"):
        tell(moment(doing))
    lines.finished("unfixed", Line(outcome(hang), hang.met, 60.0))
    assert said == [
        "expert-starvation-hang: 4 trials",
        "stack transformers 4.53.2: installing",
        "unfixed: stopped after 4.0 s, collecting evidence",
        "[1/4] unfixed: hang, culprit rank 1 (3.1 s); about 3 min left",
    ]


def view(live: Live, width: int = 80) -> str:
    out = StringIO()
    Console(file=out, width=width).print(live.view())
    return out.getvalue()


def test_live_view_follows_stacks_and_ranks(hang: TrialResult) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    live = Live(console)
    live.begin("expert-starvation-hang: 4 trials", 4)
    live.stack("transformers 4.53.2", "installing", 0.5)
    assert "transformers 4.53.2 installing" in view(live)
    live.stack("transformers 4.53.2", "ready", 1.0)
    assert "transformers" not in view(live)
    live.begun("unfixed")
    assert "[0/4] unfixed  starting" in view(live)
    live.doing("unfixed", glance(moment("running")))
    assert "running  ranks 0, 2 in-collective, rank 1 running  step 2" in view(live)
    assert "left" not in view(live)
    live.finished("unfixed", Line(outcome(hang), hang.met, 20.0))
    assert "unfixed" not in view(live)
    assert "about 60 s left" in view(live)
    live.summary("4.52 G  4.53 B")
    assert "4.52 G  4.53 B" in view(live)
    assert "unfixed: hang, culprit rank 1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_live_view_of_many_ranks_stays_short() -> None:
    live = Live(Console(file=StringIO()))
    states = {rank: "in-collective" if rank % 2 else "running" for rank in range(512)}
    live.doing("unfixed", glance(Progress("running", states, {}, 1.0)))
    assert len(view(live).splitlines()) <= 4


def test_an_unmet_expectation_is_shown(hang: TrialResult) -> None:
    text = outcome(replace(hang, met=False, expected="clean"))
    assert text == "unfixed: hang, culprit rank 1, expected clean (3.1 s)"


def test_glance_shows_the_phase_before_ranks_are_known() -> None:
    assert glance(Progress("launching", {}, {}, 0.0)) == "launching"


@pytest.mark.parametrize(
    ("finished", "items", "spent", "at_once", "left"),
    [
        ([], 3, 0.0, 1, None),  # no item has finished
        ([10.0], 0, 0.0, 1, None),  # no item remains
        ([10.0, 20.0], 4, 0.0, 1, 60.0),
        ([10.0, 20.0], 4, 5.0, 1, 55.0),  # the one at work has run for 5 s
        ([10.0, 20.0], 4, 90.0, 1, 45.0),  # slower than the others: it is not counted
        ([10.0], 1, 90.0, 1, 0.0),
        ([10.0, None], 4, 0.0, 1, 40.0),  # unknown times are ignored
        ([10.0, 20.0], 4, 0.0, 2, 30.0),
    ],
)
def test_remaining_time_is_estimated(
    finished: Sequence[float | None], items: int, spent: float, at_once: int, left: float | None
) -> None:
    pace = Pace()
    for seconds in finished:
        pace.add(seconds)
    assert pace.left(items, spent, at_once) == left


def test_the_estimate_counts_earlier_items_and_stays_within_the_bound() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.begin("s: 4 trials", 4, earlier=[30.0, None])
    assert said == ["s: 4 trials, 2 finished by an earlier command"]
    assert (lines.number, lines.eta) == ("[2/4]", "about 60 s left")
    lines.total = 402
    assert lines.eta == "about 3.3 h left"
    lines.bound = lambda: 12.0
    assert lines.eta == "about 12 s left"
    lines.begin("of unknown length", None)
    assert (lines.number, lines.eta) == ("[0]", "")


@pytest.mark.parametrize(
    ("variables", "kind"),
    [({"FORCE_COLOR": "1", "TERM": "xterm"}, Live), ({"FORCE_COLOR": "1", "CI": "1"}, Lines),
     ({"FORCE_COLOR": "1", "TERM": "dumb"}, Lines), ({}, Lines)],
)  # fmt: skip
def test_live_display_is_used_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type
) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with shown() as display:
        assert type(display) is kind
