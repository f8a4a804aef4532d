"""A report finds the scenario and the finding that cite it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag.cli import main
from moediag.errors import ScenarioError
from moediag.lab.pipeline.citations import citing
from moediag.lab.scenario import catalogue

STARVATION = "expert-starvation"


@pytest.mark.parametrize(
    "word",
    ["THUDM/slime#1010", "https://github.com/THUDM/slime/pull/1010", "#1010", "1010",
     "github.com/THUDM/slime/issues/1010#issuecomment-1"],
)  # fmt: skip
def test_a_report_finds_the_scenario_that_cites_it(word: str) -> None:
    assert catalogue.citing(word) == [STARVATION]
    assert catalogue.find(word).stem == STARVATION
    assert [entry.word for entry in citing(word)] == [STARVATION]


@pytest.mark.parametrize("word", [STARVATION, "tensor", "my-file.yaml", "v4.53.2", "--cpu"])
def test_other_words_are_no_report(word: str) -> None:
    assert catalogue.citation(word) is None


def test_another_repository_or_number_is_another_report() -> None:
    for word in ("other/slime#1010", "10101", "101"):
        assert STARVATION not in catalogue.citing(word)
    with pytest.raises(ScenarioError, match="no scenario cites foo/bar#9"):
        catalogue.find("foo/bar#9")
    with pytest.raises(ScenarioError, match="2 scenarios cite"):
        catalogue.find("NovaSky-AI/SkyRL#1297")


def test_findings_of_the_hunt_are_found() -> None:
    kinds = {entry.kind for entry in citing("huggingface/transformers#48690")}
    assert kinds == {"scenario", "finding"}


def test_a_copy_takes_over_neither_title_nor_sources(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine.yaml"), "--from", STARVATION]) == 0
    text = (tmp_path / "mine.yaml").read_text(encoding="utf-8")
    assert "sources: []" in text and "An expert without tokens" not in text
    assert "SkyRL/issues/1297" not in text
    assert "title: my failure" in text
