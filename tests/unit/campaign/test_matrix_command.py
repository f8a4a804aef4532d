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
from moediag.lab.campaign.matrix.cells import Cell, Key, Mode
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
        self.wrong: set[Key] = set()  # cells that contradict the truth

    def make_maker(self, question: MatrixQuestion, folder: Path, progress: Any, launch: Any) -> Any:
        self.digests = {s.key: s.digest for s in question.subjects}
        return self

    def make(self, key: Key) -> Cell:
        if len(self.made) == self.ends_at:
            self.ends_at = None
            raise KeyboardInterrupt
        self.made.append(key)
        subject, version, mode = key
        shows = version in WINDOW and subject.endswith("mixtral")
        if key in self.wrong:
            shows = not shows
        words = {Mode.REAL: ("clean", "collective-mismatch"),
                 Mode.FAST: ("not-susceptible", "susceptible")}  # fmt: skip
        return Cell(subject, version, mode, words[mode][shows], shows, seconds=0.1,
                    digest=self.digests[subject])  # fmt: skip

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
    for place in (asking, bisecting, session):
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
    assert lines[0] == ["mixtral", "olmoe"]
    assert ["4.52.2", ".", "."] in lines
    assert ["4.53.2", "x", "."] in lines
    assert re.search(r"^ mixtral +4.53.2 to 4.55.2 \(2 releases before it not tried", out, re.M)
    assert "[14/14] 4.57.2  expert-starvation olmoe  real  0.10 s  clean" in err
    raw = json.loads(Path("found/matrix.json").read_text(encoding="utf-8"))
    assert len(raw["cells"]) == 14
    assert Path("found/matrix.md").read_text(encoding="utf-8").startswith("## expert-starvation")
    assert world.closed == 1
    # the next environment is built while the cells of this release run
    assert world.prepared[0] == ("expert-starvation mixtral", "4.52.2", Mode.REAL)


def test_a_terminal_shows_the_running_cell(tmp_path: Path) -> None:
    shown = Display()
    said: list[tuple[str, str]] = []
    shown.doing = lambda name, text: said.append((name, text))  # type: ignore[method-assign]
    session._OfCell(shown, "s mixtral").doing("4.53.0", "unfixed: launching")
    assert said == [("s mixtral 4.53.0 real", "unfixed: launching")]


def test_json_is_one_object_on_stdout(world: World, run: Any) -> None:
    code, out, _ = run("--fast", "--json")
    assert code == ExitCode.OK
    assert {c["mode"] for c in json.loads(out)["cells"]} == {"fast"}


def test_confirm_predicts_all_cells_and_runs_those_at_changes(world: World, run: Any) -> None:
    code, out, _ = run(*FAMILIES, "--confirm", "--out", "found")
    assert code == ExitCode.OK
    assert f"{WINDOW[0]} to {WINDOW[-1]}" in out
    assert "not tried" not in out
    real = {v for s, v, mode in world.made if mode == Mode.REAL and s.endswith("mixtral")}
    edges = [VERSIONS.index(WINDOW[0]), VERSIONS.index(WINDOW[-1])]
    assert {VERSIONS[edges[0] - 1], WINDOW[0], WINDOW[-1], VERSIONS[edges[1] + 1]} <= real


def test_a_disagreement_is_shown_and_inconclusive(world: World, run: Any) -> None:
    world.wrong = {("expert-starvation mixtral", "4.51.2", Mode.REAL)}
    code, out, _ = run("--family", "mixtral", "--confirm")
    assert code == ExitCode.INCONCLUSIVE
    assert "x (.) !=" in out
    assert "4.51.2, expert-starvation mixtral: the run says collective-mismatch" in out


@pytest.mark.parametrize("way", ["--fast", "--confirm", None])
@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupted_matrix_resumes_without_repeating_cells(
    world: World, run: Any, way: str | None, after: int
) -> None:
    words = [*FAMILIES, *([way] if way else [])]
    assert run(*words, "--out", "whole")[0] == ExitCode.OK
    whole = world.made
    world.made, world.ends_at = [], after
    code, out, err = run(*words, "--out", "found")
    assert (code, out, world.closed) == (ExitCode.INTERRUPTED, "", 2)
    half = json.loads(Path("found/matrix.json").read_text(encoding="utf-8"))
    assert (len(half["cells"]), half["missing"] > 0) == (after, after < 14)
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
    assert {subject for subject, _, _ in world.made} == {"expert-starvation olmoe"}
    assert out.splitlines()[0].split() == ["olmoe", "mixtral"]


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
        ["--fast", "--confirm"],
        ["--hold", "transformers=4.53.0"],
        ["--releases", "4.53.0", "--from", "4.52"],
    ],
)
def test_a_wrong_command_line_is_one_message(world: World, run: Any, words: list[str]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: ")
    assert world.made == []


def test_a_page_contains_the_command(world: World, run: Any) -> None:
    page = Path("page.md")
    page.write_text("# Compatibility\n\nWords.\n")
    for _ in range(2):
        run("--fast", "--markdown", str(page), "--releases", "4.53.0")
    text = page.read_text()
    assert text.startswith("# Compatibility\n\nWords.\n")
    assert text.count("`moediag matrix expert-starvation --fast --markdown page.md") == 1
    assert text.count("| 4.53.0 | (.) |") == 1
    world.made = []
    for place in (page / "below", Path("nowhere/page.md"), Path()):
        code, _, err = run("--fast", "--markdown", str(place), "--releases", "4.53.0")
        assert code == ExitCode.USAGE
        assert "--markdown" in err
    assert world.made == []  # refused before anything runs


def test_dry_run_makes_nothing(world: World, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--dry-run", "--releases", "4.52.1,4.53.0", "--cpu", "2")
    assert (code, world.made) == (ExitCode.OK, [])
    first, *trials, last = out.splitlines()
    assert re.fullmatch(r"expert-starvation \S+: \d+ trials on 2 ranks, gloo", first)
    assert [line.split()[0] for line in trials].count("unfixed") == 2
    assert last.endswith("nothing was run.")
    assert not [*Path.cwd().iterdir()]
    code, out, _ = run("--dry-run", "--fast", "--releases", "4.52.1,4.53.0")
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["prediction"] * 2
