"""Progress says what happens, once, and never on stdout."""

import types
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moediag.launch.settings import Progress
from moediag.report import views
from moediag.report.progress import Lines, Live, glance, outcome
from moediag.result import RunResult, read_result

RESULTS = Path(__file__).parent.parent.parent / "golden" / "results"


@pytest.fixture
def hang() -> RunResult:
    return read_result(RESULTS / "hang.json")


def plan_of(result: RunResult) -> Any:
    return types.SimpleNamespace(
        trials=result.trials, scenario=types.SimpleNamespace(name=result.scenario)
    )


def moment(doing: str) -> Progress:
    return Progress(
        doing, {0: "in-collective", 1: "running", 2: "in-collective"}, {0: 2, 1: 1}, 4.0
    )


def test_lines_say_each_thing_once(hang: RunResult) -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.plan(plan_of(hang))
    for step in range(10):
        lines.stack("transformers 4.53.2", "installing", step / 10)
    lines.trial_started("unfixed")
    for doing in ("launching", "running", "running", "capturing", "capturing"):
        lines.trial_progress("unfixed", moment(doing))
    lines.trial_finished(hang.trials[0])
    assert said == [
        "expert-starvation-hang: 4 trials",
        "stack transformers 4.53.2: installing",
        "unfixed: stopped after 4.0 s, collecting",
        "[1/4] unfixed: hang, culprit rank 1 (3.1 s)",
    ]


def shown(live: Live, width: int = 80) -> str:
    out = StringIO()
    Console(file=out, width=width).print(live.view())
    return out.getvalue()


def test_live_view_follows_stacks_and_ranks(hang: RunResult) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    live = Live(console)
    live.plan(plan_of(hang))
    live.stack("transformers 4.53.2", "installing", 0.5)
    assert "transformers 4.53.2 installing" in shown(live)
    live.stack("transformers 4.53.2", "ready", 1.0)
    assert "transformers" not in shown(live)
    live.trial_started("unfixed")
    assert "[1/4] unfixed  launching" in shown(live)
    live.trial_progress("unfixed", moment("running"))
    assert "running  ranks 0, 2 in-collective, rank 1 running  step 2" in shown(live)
    live.trial_finished(hang.trials[0])
    assert "unfixed" not in shown(live)
    assert "unfixed: hang, culprit rank 1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_live_view_of_many_ranks_stays_on_one_line_each(hang: RunResult) -> None:
    live = Live(Console(file=StringIO()))
    live.plan(plan_of(hang))
    states = {rank: "in-collective" if rank % 2 else "running" for rank in range(512)}
    live.trial_progress("unfixed", Progress("running", states, {}, 1.0))
    assert len(shown(live).splitlines()) <= 4


def test_a_trial_that_broke_its_expectation_says_what_was_expected(hang: RunResult) -> None:
    from dataclasses import replace

    text = outcome(replace(hang.trials[0], met=False, expected="clean"))
    assert text == "unfixed: hang, culprit rank 1, expected clean (3.1 s)"


def test_a_glance_before_anything_is_known() -> None:
    assert glance(Progress("launching", {}, {}, 0.0)) == "launching"


@pytest.mark.parametrize(
    ("variables", "kind"),
    [({"FORCE_COLOR": "1", "TERM": "xterm"}, Live), ({"FORCE_COLOR": "1", "CI": "1"}, Lines),
     ({"FORCE_COLOR": "1", "TERM": "dumb"}, Lines), ({}, Lines)],
)  # fmt: skip
def test_live_only_where_a_person_watches(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type
) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with views.progress() as observer:
        assert type(observer) is kind
