"""Programs: their options in a scenario, and that each exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag import protocol
from moediag.errors import ScenarioError
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan
from moediag.protocol import ProgramTask

TEXT = """\
schema_version: 1
name: own
title: a program
program: {name: demo, options: {ranks: 3}}
variants:
  unfixed: {role: unfixed, expect: {verdict: hang}}
  other: {role: fix, program: {options: {mode: b}}, expect: {verdict: clean}}
"""


@pytest.fixture(autouse=True)
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        protocol.PROGRAMS, "demo", {"ranks": 1, "rate": 0.5, "on": True, "mode": ("a", "b")}
    )


def scenario(tmp_path: Path, text: str = TEXT):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return load(path)


def test_a_variants_options_override_the_scenarios_and_the_defaults(
    tmp_path: Path,
) -> None:
    trials = [p.trial for p in plan(scenario(tmp_path), 2, "cpu").trials]
    options = [t.task.options for t in trials if isinstance(t.task, ProgramTask)]
    assert options == [
        {"ranks": 3, "rate": 0.5, "on": True, "mode": "a"},
        {"ranks": 3, "rate": 0.5, "on": True, "mode": "b"},
    ]
    assert all(p.reference_key is None for p in plan(scenario(tmp_path), 2, "cpu").trials)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "name: demo",
            "name: dmeo",
            '4:17: program.name: no program is called "dmeo"; did you mean',
        ),
        (
            "ranks: 3",
            "rank: 3",
            "program.options.rank: demo has no such option; did you mean",
        ),
        ("ranks: 3", "ranks: x", "4:40: program.options.ranks: 'x', but a int belongs there"),
        ("ranks: 3", "on: 1", "program.options.on: 1, but a bool belongs there"),
        ("mode: b", "mode: c", "variants.other.program.options.mode: 'c' is none of a, b"),
    ],
)
def test_a_mistake_is_located(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, TEXT.replace(old, new))
    assert said in caught.value.message


def test_an_integer_is_accepted_for_a_float() -> None:
    assert protocol.program_options("demo", {"rate": 1})["rate"] == 1


def test_every_program_has_its_module() -> None:
    folder = Path(protocol.__file__).parents[1] / "lab" / "step" / "programs"
    modules = {p.stem.replace("_", "-") for p in folder.glob("[a-z]*.py")}
    assert set(protocol.PROGRAMS) - {"demo"} <= modules
