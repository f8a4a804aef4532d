"""Programs and fixes: what their files say, how scenarios name them, and how ranks load them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from moediag.errors import ScenarioError
from moediag.lab.campaign.run import digest
from moediag.lab.cli.init import init
from moediag.lab.content import FIXES, PROGRAMS, folder
from moediag.lab.scenario import content
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan
from moediag.lab.scenario.schema import Scenario
from moediag.protocol import ProgramTask

DEMO = """\
import torch_that_no_control_side_has
from . import helper

OPTIONS: dict = {"ranks": 1, "rate": 0.5, "on": True, "mode": ("a", "b")}


def run(collector): ...
"""
REPAIR = """\
SUMMARY = "repairs it"
SOURCE = "an example"


def after_wrap(model, anatomy, wrapper): ...
"""
TEXT = """\
schema_version: 1
name: own
title: a program
program: {name: ./demo.py, options: {ranks: 3}}
cost: {fixes: [touch]}
variants:
  unfixed: {role: unfixed, expect: {verdict: hang}}
  other: {role: fix, program: {options: {mode: b}}, fix: fixes/repair.py, expect: {verdict: clean}}
"""


def write(place: Path, text: str = TEXT, demo: str = DEMO, repair: str = REPAIR) -> Path:
    (place / "fixes").mkdir(parents=True, exist_ok=True)
    (place / "demo.py").write_text(demo)
    (place / "fixes" / "repair.py").write_text(repair)
    (place / "own.yaml").write_text(text)
    return place / "own.yaml"


def scenario(place: Path, text: str = TEXT, demo: str = DEMO, repair: str = REPAIR) -> Scenario:
    return load(write(place, text, demo, repair))


def mistake(place: Path, text: str = TEXT, demo: str = DEMO, repair: str = REPAIR) -> str:
    with pytest.raises(ScenarioError) as caught:
        scenario(place, text, demo, repair)
    return caught.value.message.replace(str(place), "DIR")


# ---------------------------------------------------------------- what the shipped ones say


@pytest.mark.parametrize("name", content.names(PROGRAMS))
def test_a_program_has_the_options_that_its_file_says(name: str) -> None:
    pytest.importorskip("torch")
    from moediag.lab.step import content as ranks

    module = ranks.program(name)
    assert content.program(name).options == module.OPTIONS
    assert callable(module.run)


def test_a_fix_has_the_summary_that_its_file_says() -> None:
    pytest.importorskip("torch")
    from moediag.lab.step import content as ranks

    assert "zero-fill" in content.names(FIXES)
    for name in content.names(FIXES):
        fix, module = content.fix(name), ranks.fix(name)
        assert (fix.name, fix.summary, fix.source) == (name, module.SUMMARY, module.SOURCE)
        assert fix.summary and fix.source


def test_helpers_are_no_programs(tmp_path: Path) -> None:
    helpers = {"matrices", "fake_engine", "_meshes"}
    assert helpers <= {path.stem for path in (folder() / PROGRAMS).glob("*.py")}
    assert not helpers & {name.replace("-", "_") for name in content.names(PROGRAMS)}
    said = mistake(tmp_path, TEXT.replace("./demo.py", "matrices"))
    assert 'no program is called "matrices"; did you mean "metrics"?' in said


# ---------------------------------------------------------------- what a scenario names


def test_a_variants_options_override_the_scenarios_and_the_defaults(tmp_path: Path) -> None:
    trials = [p.trial for p in plan(scenario(tmp_path), 2, "cpu", timed=False).trials]
    options = [t.task.options for t in trials if isinstance(t.task, ProgramTask)]
    assert options == [
        {"ranks": 3, "rate": 0.5, "on": True, "mode": "a"},
        {"ranks": 3, "rate": 0.5, "on": True, "mode": "b"},
    ]
    assert all(p.reference_key is None for p in plan(scenario(tmp_path), 2, "cpu").trials)


def test_paths_are_relative_to_the_scenario_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "place")
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load(Path("../place/own.yaml"))
    planned = plan(found, 2, "cpu").trials[1]
    assert isinstance(planned.trial.task, ProgramTask)
    assert planned.trial.task.name == str(tmp_path / "place" / "demo.py")
    assert planned.trial.fix == str(tmp_path / "place" / "fixes" / "repair.py")
    assert (planned.what, planned.source) == ("repairs it", "an example")
    # What a run keeps in its folder names the same files.
    (tmp_path / "kept.yaml").write_text(found.to_yaml())
    assert load(tmp_path / "kept.yaml") == found


def test_a_path_of_the_command_line_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "place")
    (tmp_path / "mine.py").write_text(DEMO)
    monkeypatch.chdir(tmp_path)
    found = load(path, ["program.name=./mine.py", "cost.fixes=[place/fixes/repair.py]"])
    assert found.program is not None and found.cost is not None
    assert found.program.name == str(tmp_path / "mine.py")
    assert found.cost.fixes == [str(tmp_path / "place" / "fixes" / "repair.py")]
    with pytest.raises(ScenarioError, match=r"program.name: .*/no.py: No such"):
        load(path, ["program.name=./no.py"])


def test_a_copy_of_a_scenario_names_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "place")
    (tmp_path / "copies").mkdir()
    monkeypatch.chdir(tmp_path)
    init(Path("copies/copy.yaml"), from_=str(path))
    text = (tmp_path / "copies" / "copy.yaml").read_text()
    assert "name: ../place/demo.py" in text and "fix: ../place/fixes/repair.py" in text
    assert load(Path("copies/copy.yaml")).own_files() == load(path).own_files()


def test_an_edit_of_a_users_own_file_is_another_question(tmp_path: Path) -> None:
    def asked(**files: str) -> str:
        return digest(plan(scenario(tmp_path, **files), 2, "cpu"))

    before = asked()
    assert asked(demo=f"{DEMO}# edited\n") != before
    assert asked(repair=f"{REPAIR}# edited\n") != before
    (tmp_path / "unused.py").write_text(DEMO)
    assert asked() == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("./demo.py", "metirc", '4:17: program.name: no program is called "metirc"; did you mean'),
        ("./demo.py", "./demo", 'no program is called "./demo"; the path of your own ends in .py'),
        ("./demo.py", "no.py", "4:17: program.name: DIR/no.py: No such file or directory"),
        ("repair.py", "no.py", "variants.other.fix: DIR/fixes/no.py: No such file or directory"),
        ("fixes/repair.py", "tuoch", 'no fix is called "tuoch"; did you mean "touch"?'),
        ("fixes: [touch]", "fixes: [no.py]", "5:16: cost.fixes[0]: DIR/no.py: No such file"),
        ("ranks: 3", "rank: 3", "program.options.rank: DIR/demo.py has no such option; did you"),
        ("ranks: 3", "ranks: x", "4:45: program.options.ranks: must be a whole number, not 'x'"),
        ("ranks: 3", "on: 1", "program.options.on: must be true or false, not 1"),
        ("mode: b", "mode: c", "variants.other.program.options.mode: must be one of a, b, not 'c'"),
        (
            "{options: {mode: b}}",
            "{name: metrics}",
            "variants.other.program.options.ranks: metrics has no such option",
        ),
    ],
)
def test_a_mistake_of_a_scenario_is_located(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in mistake(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("demo", "said"),
    [
        ("def run(collector: ...\n", "DIR/demo.py:1: '(' was never closed"),
        ("OPTIONS = {}\n", "DIR/demo.py: not a program: define run(collector)"),
        (
            "MODES = 'a',\nOPTIONS = {'mode': MODES}\ndef run(collector): ...\n",
            "DIR/demo.py:2: OPTIONS is computed; write plain values",
        ),
        (DEMO.replace('("a", "b")', '["a"]'), "DIR/demo.py: OPTIONS must map the name of each"),
        (DEMO.replace('("a", "b")', "()"), "DIR/demo.py: OPTIONS must map the name of each"),
        ("\0", "DIR/demo.py"),
    ],
)
def test_a_mistake_of_a_program_is_told(tmp_path: Path, demo: str, said: str) -> None:
    assert f"own.yaml:4:17: program.name: {said}" in mistake(tmp_path, demo=demo)


def test_a_fix_must_have_a_function(tmp_path: Path) -> None:
    said = mistake(tmp_path, repair=REPAIR.replace("after_wrap", "after"))
    assert "fix: DIR/fixes/repair.py: not a fix: define before_wrap(model, anatomy, " in said
    imported = 'from helper import before_wrap\nSUMMARY = ""\n'
    planned = plan(scenario(tmp_path, repair=imported), 2, "cpu").trials[1]
    assert (planned.what, planned.source) == ("", "")


def test_an_integer_is_accepted_for_a_float(tmp_path: Path) -> None:
    planned = plan(scenario(tmp_path, TEXT.replace("ranks: 3", "rate: 1")), 2, "cpu").trials[0]
    assert isinstance(planned.trial.task, ProgramTask)
    assert planned.trial.task.options["rate"] == 1


def test_a_program_needs_no_options(tmp_path: Path) -> None:
    text = TEXT.replace(", options: {ranks: 3}", "").replace("program: {options: {mode: b}}, ", "")
    planned = plan(scenario(tmp_path, text, demo="def run(collector): ...\n"), 2, "cpu").trials[0]
    assert isinstance(planned.trial.task, ProgramTask)
    assert planned.trial.task.options == {}


# ---------------------------------------------------------------- what a rank loads


def test_a_rank_loads_the_file_with_the_modules_beside_it(tmp_path: Path) -> None:
    from moediag.lab.step import content as ranks

    for place, value in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
        place.mkdir()
        (place / "helper.py").write_text(f"VALUE = {value}\n")
        (place / "json.py").write_text(
            "import json\nfrom . import helper\n\n\ndef run(collector):\n"
            "    return helper.VALUE, json.dumps\n"
        )
        run = ranks.program(str(place / "json.py")).run
        assert run(None) == (value, json.dumps)
        assert pickle.loads(pickle.dumps(run)) is run


def test_a_file_that_cannot_be_imported_is_not_kept(tmp_path: Path) -> None:
    from moediag.lab.step import content as ranks

    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            ranks.fix(str(path))


def test_lines_of_a_shipped_program_are_not_the_users(tmp_path: Path) -> None:
    from moediag.protocol import in_libraries
    from moediag.recorder.library_folders import library_folders

    shipped, own = folder() / PROGRAMS / "metrics.py", tmp_path / "demo.py"
    assert in_libraries([str(shipped), str(own)], library_folders()) == [True, False]
