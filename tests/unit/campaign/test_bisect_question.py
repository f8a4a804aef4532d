"""Releases to search, their companions, and invalid questions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import NoSuchRelease, UsageError
from moediag.lab.campaign.bisect import question as module
from moediag.lab.campaign.bisect.question import Asked, Question, ask
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.engine.journal import _differences
from moediag.lab.scenario import catalogue, load
from moediag.lab.stacks.base import Base
from moediag.lab.stacks.releases import Release


def release(version: str, day: str = "", **more: Any) -> Release:
    moment = datetime.fromisoformat(day).replace(tzinfo=timezone.utc) if day else None
    return Release(version, moment, **more)


INDEX = {
    "transformers": [
        release("4.30.0", "2022-06-01"),
        release("4.51.0", "2025-04-05"),
        release("4.52.0", "2025-05-20", yanked=True),
        release("4.52.4", "2025-05-30"),
        release("4.53.0rc1", "2025-06-20", prerelease=True),
        release("4.53.0", "2025-06-26"),
        release("4.53.2", "2025-07-11"),
        release("5.0.0", "2026-01-26", requires_python=">=3.12"),
    ],
    "accelerate": [release("1.8.1", "2025-06-20"), release("1.15.0", "2026-09-09")],
    "trl": [
        release("0.19.0", "2025-06-21"),
        release("0.19.1", "2025-06-26"),
        release("0.20.0rc1", "2025-06-26", prerelease=True),
        release("0.20.0", "2025-07-01"),
        release("1.16.0", "2026-06-01"),
    ],
    "torch": [
        release("2.12.0", "2026-05-01"),
        release("2.13.0", "2026-07-08"),
        release("2.13.0+cpu"),
    ],
}


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    def releases(package: str, _: Any = None) -> list[Release]:
        if package not in INDEX:
            raise NoSuchRelease(f"no package named {package}")
        return INDEX[package]

    base = Base(Path("python"), "python", "3.11.7", "2.13.0+cpu", None)
    monkeypatch.setattr(module.index, "releases", releases)
    monkeypatch.setattr(module, "current_base", lambda _: base)


def asked(scenario: str = "expert-starvation", *overrides: str, **options: Any) -> Question:
    return ask(load.load(catalogue.find(scenario), overrides), Asked(**options))


def request(question: Question, version: str) -> Mapping[str, str]:
    (found,) = [r for r in question.releases if r.version == version]
    return question.request(found)


def test_bad_release_comes_from_the_scenario_and_old_ones_are_left_out() -> None:
    question = asked()
    assert (question.bad, question.good, question.variant) == ("4.53.2", None, "unfixed")
    assert question.versions == ("4.51.0", "4.52.4", "4.53.0", "4.53.2", "5.0.0")


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"yanked": True}, {"4.52.0"}),
        ({"pre": True}, {"4.53.0rc1"}),
        ({"good": "4.52.0"}, {"4.52.0"}),
        ({"bad": "4.53.0rc1"}, {"4.53.0rc1"}),
        ({"oldest": "4.30.0"}, {"4.30.0"}),
        ({"good": "4.30.0"}, {"4.30.0"}),
    ],
)
def test_requested_releases_are_searched_too(options: dict[str, Any], more: set[str]) -> None:
    assert set(asked(**options).versions) - set(asked().versions) == more


def test_companions_follow_the_release_date_unless_held() -> None:
    assert request(asked("ep-overwrite", bad="4.53.0"), "4.53.0") == {"transformers": "4.53.0"}
    held = asked("ep-overwrite", bad="4.53.0", hold={"Accelerate": "1.15.0"})
    assert request(held, "4.53.0") == {"transformers": "4.53.0", "accelerate": "1.15.0"}


def test_an_independent_companion_follows_the_release_date() -> None:
    question = asked("ep-sft", bad="4.53.2")
    assert request(question, "4.53.0") == {"transformers": "4.53.0", "trl": "0.19.1"}
    assert request(question, "4.53.2")["trl"] == "0.20.0"


def test_another_package_is_searched_with_the_scenarios_stack() -> None:
    question = asked("ep-overwrite", package="accelerate")
    assert question.bad == "1.15.0"
    assert request(question, "1.8.1") == {"accelerate": "1.8.1", "transformers": "5.12.1"}
    torch = asked(package="torch")
    assert (torch.bad, torch.versions) == ("2.13.0", ("2.12.0", "2.13.0"))
    assert request(torch, "2.12.0") == {"torch": "2.12.0", "transformers": "4.53.2"}


def test_another_python_is_requested() -> None:
    question = asked(python="3.12")
    assert request(question, "5.0.0") == {"transformers": "5.0.0", "python": "3.12"}
    assert question.python == "3.12"


def test_only_controls_relevant_to_the_variant_are_run() -> None:
    """Controls of other model families may fail where those have a bug of their own."""
    question = asked()
    assert question.controls == ("identical-batches", "starved-everywhere")
    plan = question.plan(question.request(question.releases[0]), 3)
    assert [t.trial.name for t in plan.trials] == [
        "unfixed", "unfixed.2", "unfixed.3", "identical-batches", "starved-everywhere",
    ]  # fmt: skip
    assert {t.stack["transformers"] for t in plan.trials} == {"4.51.0"}


@pytest.mark.parametrize("noting", [True, False])
def test_only_the_variant_records_which_functions_it_runs(noting: bool) -> None:
    question = asked()
    plan = question.plan(question.request(question.releases[0]), 2, noting)
    recorded = [t.trial.name for t in plan.trials if t.trial.executed]
    assert recorded == (["unfixed", "unfixed.2"] if noting else [])


def test_a_variants_own_releases_set_only_the_bad_end() -> None:
    question = asked("ep-ignored-modules", variant="unfixed-newest", package="accelerate")
    newest = load.load(catalogue.find("ep-ignored-modules")).merged("unfixed-newest").stack
    assert question.bad == newest["accelerate"]
    plan = question.plan(question.request(question.releases[0]), 1)
    assert {t.stack["accelerate"] for t in plan.trials} == {"1.8.1"}
    assert {t.stack["transformers"] for t in plan.trials} == {newest["transformers"]}


def test_a_probe_can_be_repeated_from_its_scenario_file(tmp_path: Path) -> None:
    question = asked()
    plan = question.plan(question.request(question.releases[2]), 2)
    file = tmp_path / f"{question.scenario.name}.yaml"
    file.write_text(plan.scenario.to_yaml(), encoding="utf-8")
    assert load.load(file) == plan.scenario


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bad": "4.53.1"}, NoSuchRelease, "there is no transformers 4.53.1.*4.53.2"),
        ({"good": "newest"}, NoSuchRelease, "not a version"),
        ({"good": "4.53.2"}, UsageError, "the same release"),
        ({"variant": "upgrade"}, UsageError, "no unfixed variant"),
        ({"package": "accelerate"}, UsageError, "names no release of accelerate"),
        ({"package": "nothing-like-it", "bad": "1"}, NoSuchRelease, "no package named"),
        ({"hold": {"transformers": "5.0.0"}}, UsageError, "the package that is searched"),
        ({"hold": {"python": "3.12"}}, UsageError, "use --python"),
    ],
)
def test_impossible_questions_are_refused(options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        asked(**options)


def test_search_options_have_the_patience_and_the_given_ends() -> None:
    question = asked(good="4.51.0", window=True)
    options = question.options(question.versions, Rate(2, 3))
    assert (options.bad, options.good, options.window) == (3, 0, True)
    assert (options.patience, options.rate) == (module.PATIENCE, Rate(2, 3))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"window": True}, "window"),
        ({"good": "4.52.4"}, "good end"),
        ({"hold": {"accelerate": "1.8.1"}}, "hold"),
        ({"world_size": 4}, "ranks"),
        ({"python": "3.12"}, "Python"),
        ({"calibrate": 5}, "trials of the bad end"),
    ],
)
def test_another_question_does_not_resume(options: dict[str, Any], word: str) -> None:
    there = asked().header(["moediag"])
    assert not list(_differences(there, asked().header(["moediag", "bisect"])))
    (found,) = _differences(there, asked(**options).header(["moediag"]))
    assert word in found


def test_another_scenario_does_not_resume() -> None:
    there = asked().header([])
    other = asked("expert-starvation", "model.experts=16").header([])
    (found,) = _differences(there, other)
    assert "its files or the options" in found


def test_a_resumed_question_keeps_its_releases() -> None:
    question = asked().over(("4.52.4", "4.53.2", "4.53.99"))
    assert [r.uploaded is None for r in question.releases] == [False, False, True]
