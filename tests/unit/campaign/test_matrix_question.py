"""Releases and columns of a matrix, and invalid questions."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from moediag.errors import MoediagError, NoSuchRelease
from moediag.lab.campaign.bisect import question as bisecting
from moediag.lab.campaign.bisect.question import Asked
from moediag.lab.campaign.matrix import question as module
from moediag.lab.campaign.matrix.question import MatrixQuestion, Wanted, ask
from moediag.lab.scenario.sections import Family
from moediag.lab.stacks.releases import Release

DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)
VERSIONS = [
    "4.30.0", "4.50.3", "4.51.0", "4.51.3", "4.52.0", "4.52.4", "4.53.0", "4.53.1", "4.53.3",
    "5.0.0rc1", "5.0.0", "5.1.0", "5.7.0", "5.7.1", "5.23.0",
]  # fmt: skip
INDEX = {
    "transformers": [
        Release(v, DAY, yanked=v == "4.52.0", prerelease="rc" in v,
                requires_python=">=3.12" if v == "5.23.0" else None)
        for v in VERSIONS
    ],
    "accelerate": [Release("1.8.1", DAY), Release("1.15.0", DAY)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    def releases(package: str, _: Any = None) -> list[Release]:
        if package not in INDEX:
            raise NoSuchRelease(f"no package named {package}")
        return INDEX[package]

    monkeypatch.setattr(module.index, "releases", releases)
    base = SimpleNamespace(python="3.11.7", torch="2.13.0")
    for place in (module, bisecting):
        monkeypatch.setattr(place, "current_base", lambda _: base)


def wanted(*names: str, **more: Any) -> MatrixQuestion:
    return ask(Wanted(names or ("expert-starvation",), **more))


def test_rows_are_the_newest_patch_of_each_minor_since_4_51() -> None:
    found = wanted()
    assert found.versions == ("4.51.3", "4.52.4", "4.53.3", "5.0.0", "5.1.0", "5.7.1")
    assert found.listed[0] == "4.51.3"
    assert "4.53.1" in found.listed
    assert not {"4.52.0", "5.0.0rc1", "5.23.0"} & set(found.listed)


@pytest.mark.parametrize(
    ("more", "versions"),
    [
        ({"oldest": "5.0"}, ("5.0.0", "5.1.0", "5.7.1")),
        ({"newest": "4.53"}, ("4.51.3", "4.52.4", "4.53.3")),
        ({"newest": "4.53.1"}, ("4.51.3", "4.52.4", "4.53.1")),
        ({"oldest": "4.53.1", "newest": "5.0.0"}, ("4.53.3", "5.0.0")),
        ({"oldest": "4.30"}, ("4.30.0", "4.50.3", "4.51.3", "4.52.4", "4.53.3", "5.0.0", "5.1.0",
                              "5.7.1")),
        ({"releases": ("5.0.0", "4.53.0")}, ("4.53.0", "5.0.0")),
        ({"releases": ("4.52.0", "4.30.0")}, ("4.30.0", "4.52.0")),  # withdrawn, but requested
    ],
)  # fmt: skip
def test_requested_rows_are_used(more: dict[str, Any], versions: tuple[str, ...]) -> None:
    assert wanted(**more).versions == versions


@pytest.mark.parametrize(
    "more",
    [
        {"oldest": "5.30"},
        {"oldest": "5.0", "newest": "4.53"},
        {"oldest": "new"},
        {"releases": ("4.99.0",)},
        {"releases": ("5.0.0",), "oldest": "5.0"},
        {"package": "nowhere"},
        {"families": ("gpt5",)},
        {"overrides": ("model.family=gpt5",)},
        {"asked": Asked(variant="nothing")},
    ],
)
def test_an_impossible_question_is_one_message(more: dict[str, Any]) -> None:
    with pytest.raises(MoediagError) as caught:
        wanted(**more)
    assert caught.value.exit_code == 2


def test_families_from_options_and_overrides_are_columns() -> None:
    found = wanted(families=("olmoe", "mixtral"), overrides=("model.family=llama4", "step.steps=1"))
    assert [s.family for s in found.subjects] == ["llama4", "olmoe", "mixtral"]
    assert found.keys[0] == "expert-starvation llama4"
    assert {s.merged.step.steps for s in found.subjects} == {1}
    assert [s.family for s in wanted(families=("all",)).subjects] == list(get_args(Family))
    assert len({s.digest for s in found.subjects}) == 3


def test_a_column_runs_only_the_unfixed_variant_and_its_controls() -> None:
    (subject,) = wanted().subjects
    assert set(subject.question.scenario.variants) == {
        "unfixed", "identical-batches", "starved-everywhere"
    }  # fmt: skip
    assert subject.target.declared == ("collective-mismatch",)
    assert subject.target.rate.repeats() == 1
    often = wanted("ep-nan-rows").subjects[0].target
    assert often.rate.repeats() > 5  # an intermittent failure


def test_digest_changes_with_the_run() -> None:
    plain = wanted().subjects[0].digest
    assert wanted(oldest="5.0").subjects[0].digest == plain
    assert wanted(overrides=("step.steps=1",)).subjects[0].digest != plain
    silent = wanted("ep-overwrite").subjects[0].digest
    other = wanted("ep-overwrite", asked=Asked(variant="unfixed-every-rank-loads"))
    assert other.subjects[0].digest != silent


def test_companions_are_held_on_request() -> None:
    found = wanted(asked=Asked(hold={"Accelerate": "1.15.0"}))
    (subject,) = found.subjects
    release = subject.question.releases[0]
    assert subject.question.request(release) == {
        "transformers": "4.51.3", "accelerate": "1.15.0"
    }  # fmt: skip
