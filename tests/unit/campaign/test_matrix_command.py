"""`moediag matrix` as a command: exit codes, streams, files; interrupted and resumed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag.cli import app
from moediag.errors import ExitCode
from moediag.lab.campaign.bisect import question as bisecting
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.matrix import question as asking
from moediag.lab.campaign.matrix import session
from moediag.lab.campaign.matrix.cells import Cell, Key
from moediag.lab.campaign.matrix.question import MatrixQuestion
from moediag.lab.stacks.releases import Release

VERSIONS = [f"4.{minor}.{patch}" for minor in range(51, 58) for patch in range(3)]
WINDOW = VERSIONS[6:15]  # releases with the failure


class World:
    """Replaces environments and ranks. ``ends_at``: the cell at which Ctrl-C is pressed."""

    def __init__(self) -> None:
        self.made: list[Key] = []
        self.prepared: list[Key] = []
        self.closed = 0
        self.ends_at: int | None = None

    def make_maker(self, question: MatrixQuestion, folder: Path, progress: Any, launch: Any) -> Any:
        self.digests = {s.key: s.digest for s in question.subjects}
        return self

    def make(self, key: Key) -> Cell:
        if len(self.made) == self.ends_at:
            self.ends_at = None
            raise KeyboardInterrupt
        self.made.append(key)
        subject, version = key
        shows = version in WINDOW and subject.endswith("mixtral")
        verdict = "collective-mismatch" if shows else "clean"
        return Cell(subject, version, verdict, shows, seconds=0.1, digest=self.digests[subject])

    def prepare(self, key: Key) -> None:
        self.prepared.append(key)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    found = World()
    releases = [Release(v) for v in VERSIONS]
    monkeypatch.setattr(asking.index, "releases", lambda package, _=None: releases)
    base = SimpleNamespace(python="3.11.7", torch="2.13.0")
    for place in (asking, bisecting):
        monkeypatch.setattr(place, "current_base", lambda _: base)
    monkeypatch.setattr(session, "Cells", found.make_maker)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = app.main(["matrix", "expert-starvation", *arguments])
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


FAMILIES = ("--family", "mixtral", "--family", "olmoe")


def test_a_table_is_printed_and_saved(world: World, run: Any) -> None:
    code, out, err = run(*FAMILIES, "--out", "found")
    assert code == ExitCode.OK
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["transformers", "mixtral", "olmoe"]
    assert ["4.52.2", ".", "."] in lines
    assert ["4.53.2", "x", "."] in lines
    assert re.search(r"^ +mixtral +4.53.2 to 4.55.2 \(2 releases before it not tried", out, re.M)
    assert "[14/14] 4.57.2  expert-starvation olmoe  0.10 s  clean" in err
    raw = json.loads(Path("found/matrix.json").read_text(encoding="utf-8"))
    assert len(raw["cells"]) == 14
    assert Path("found/matrix.md").read_text(encoding="utf-8").startswith("## expert-starvation")
    assert world.closed == 1
    names = [f"expert-starvation {family}" for family in ("mixtral", "olmoe")]
    assert world.made == [(s, v) for v in VERSIONS[2::3] for s in names]  # release by release
    # the next environment is built while the cells of this release run
    assert world.prepared[0] == ("expert-starvation mixtral", "4.52.2")


def test_the_page_is_written_as_html_and_junit(world: World, run: Any) -> None:
    code, _, err = run("--releases", "4.53.0", "--html", "page.html", "--junit", "cells.xml")
    assert code == ExitCode.OK and "wrote page.html\n" in err
    assert "expert-starvation by release of transformers" in Path("page.html").read_text()
    assert 'name="4.53.0" classname="expert-starvation' in Path("cells.xml").read_text()


def test_a_terminal_shows_the_running_cell(tmp_path: Path) -> None:
    shown = Display()
    said: list[tuple[str, str]] = []
    shown.doing = lambda name, text: said.append((name, text))  # type: ignore[method-assign]
    session._OfCell(shown, "s mixtral").doing("4.53.0", "unfixed: launching")
    assert said == [("s mixtral 4.53.0", "unfixed: launching")]


def test_json_is_one_object_on_stdout(world: World, run: Any) -> None:
    code, out, _ = run("--releases", "4.51.0,4.53.0", "--json")
    assert code == ExitCode.OK
    assert [c["version"] for c in json.loads(out)["cells"]] == ["4.51.0", "4.53.0"]


@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupted_matrix_resumes_without_repeating_cells(
    world: World, run: Any, after: int
) -> None:
    assert run(*FAMILIES, "--out", "whole")[0] == ExitCode.OK
    whole = world.made
    world.made, world.ends_at = [], after
    code, out, err = run(*FAMILIES, "--out", "found")
    assert (code, out, world.closed) == (ExitCode.INTERRUPTED, "", 2)
    half = json.loads(Path("found/matrix.json").read_text(encoding="utf-8"))
    assert (len(half["cells"]), half["missing"] > 0) == (after, after < 14)
    assert half["state"] == "inconclusive"
    assert "**inconclusive**" in Path("found/matrix.md").read_text(encoding="utf-8")
    (line,) = [text for text in err.splitlines() if text.startswith("To resume: ")]
    command = shlex.split(line.removeprefix("To resume: "))
    assert command[:3] == ["moediag", "matrix", "expert-starvation"]
    assert run(*command[3:])[0] == ExitCode.OK
    assert world.made == whole
    again = [Path(name, "matrix.json").read_text() for name in ("whole", "found")]
    assert again[0] == again[1]
    assert run(*command[3:])[0] == ExitCode.OK  # no cell remains
    assert world.made == whole


def test_later_columns_run_only_their_cells(world: World, run: Any) -> None:
    run("--family", "mixtral", "--out", "found")
    world.made = []
    code, out, _ = run("--family", "olmoe", "--out", "found", "--resume")
    assert code == ExitCode.OK
    assert {subject for subject, _ in world.made} == {"expert-starvation olmoe"}
    assert out.splitlines()[1].split() == ["transformers", "olmoe", "mixtral"]


def test_another_question_is_refused(world: World, run: Any) -> None:
    run("--family", "mixtral", "--out", "found", "--releases", "4.53.0")
    before = Path("found/journal.jsonl").read_bytes()
    for words in (["--cpu", "4"], ["--set", "step.steps=1"], ["--timeout", "9"]):
        code, _, err = run("--family", "mixtral", "--out", "found", "--resume", *words)
        assert code == ExitCode.USAGE
        assert "belongs to another matrix" in err
    assert Path("found/journal.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--resume"],
        ["--resume", "--out", "nowhere"],
        ["--hold", "transformers=4.53.0"],
        ["--releases", "4.53.0", "--from", "4.52"],
    ],
)
def test_a_wrong_command_line_is_one_message(world: World, run: Any, words: list[str]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: ")
    assert world.made == []


def test_dry_run_makes_nothing(world: World, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--dry-run", "--releases", "4.52.1,4.53.0", "--cpu", "2")
    assert (code, world.made) == (ExitCode.OK, [])
    first, *trials, last = out.splitlines()
    assert re.fullmatch(r"expert-starvation \S+: \d+ trials on 2 ranks, gloo", first)
    assert [line.split()[0] for line in trials].count("unfixed") == 2
    assert last.endswith("nothing was run.")
    assert not [*Path.cwd().iterdir()]
