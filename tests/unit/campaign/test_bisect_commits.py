"""From two releases to the commit: a real, tiny clone, and a prober that reads its source."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag.errors import Interrupted, UsageError
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.commits import commits as module
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.commits.commit_answer import CommitAnswer
from moediag.lab.campaign.bisect.commits.commits import Between, name_the_commit, tops_of
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import Maker
from tests.unit.bisect_fakes import TARGET, Fake, question
from tests.unit.tiny_clone import PERSON, TinyClone, from_letters, installs_mini

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PERSON.items():
        monkeypatch.setenv(name, value)
    installs_mini(monkeypatch)


@contextlib.contextmanager
def following(folder: Path, prober: Fake) -> Iterator[Follow]:
    header = question("GB", 1).header(["moediag", "bisect"])
    there = (folder / JOURNAL_FILE).exists()
    with states.resume(folder, header) if there else states.create(folder, header) as state:
        yield Follow(state, Maker(lambda: prober), Display(), TARGET)


def named(
    clone: TinyClone, folder: Path, turns: str = "bad", prober: Fake | None = None
) -> CommitAnswer:
    between = Between("mini", "1.0", "1.1", turns, ({"mini": "1.0"}, {"mini": "1.1"}))
    with following(folder, prober or Fake("GB")) as follow:
        return name_the_commit(between, Clone(clone.path), follow, folder)


def message(answer: CommitAnswer) -> str | None:
    return answer.first.subject if answer.first else None


@pytest.mark.parametrize(
    ("letters", "turns", "first"),
    [
        ("GB", "bad", "change 1"),
        ("GGGGBBB", "bad", "change 4"),
        ("GBBBBBBBBBBBB", "bad", "change 1"),
        ("BBBBGG", "good", "change 4"),
    ],
)
def test_the_first_bad_or_good_commit_is_found(
    tmp_path: Path, letters: str, turns: str, first: str
) -> None:
    clone = from_letters(tmp_path / "clone", letters)
    answer = named(clone, tmp_path / "out", turns)
    assert message(answer) == first
    assert answer.first is not None and answer.first.hash == clone.commits[first]
    text = answer.sentence()
    assert f"2025-06-05, Ann: {first}) is the first {turns} one of" in text
    assert "between mini 1.0 and 1.1" in text
    assert answer.to_json()["first"]["subject"] == first


def test_commits_that_do_not_touch_the_package_are_not_tried(tmp_path: Path) -> None:
    clone = TinyClone(tmp_path / "clone")
    clone.commit("begin", "G", "v1.0")
    for number in range(20):
        clone.commit(f"words {number}")
    clone.commit("guilty", "B", "v1.1")
    prober = Fake("GB")
    answer = named(clone, tmp_path / "out", prober=prober)
    assert message(answer) == "guilty"
    assert len(prober.asked) == 4, "both ends, and both again"


def test_commits_that_cannot_be_tried_are_skipped(tmp_path: Path) -> None:
    clone = TinyClone(tmp_path / "clone")
    clone.commit("begin", "G", "v1.0")
    clone.commit("fails to import", "S")
    clone.remove("without the package")
    clone.commit("it is back", "B")
    clone.commit("end", "B", "v1.1")
    answer = named(clone, tmp_path / "out")
    assert message(answer) is None
    assert "The first bad commit is one of 3" in answer.sentence()
    assert "2 could not be judged" in answer.sentence()
    assert "has no mini" in answer.sentence()
    assert answer.to_json()["candidates"][-1] == clone.commits["it is back"]


def test_an_unrelated_failure_does_not_move_a_bound(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GGOGOBOB")
    answer = named(clone, tmp_path / "out")
    assert not answer.found
    assert answer.boundary is not None and answer.boundary.good is not None
    names = [c.hash for c in answer.commits]
    assert names[answer.boundary.good] == clone.commits["change 3"]
    assert names[answer.boundary.bad] == clone.commits["change 5"]


def branches(path: Path, main: str, old: str, new: str) -> TinyClone:
    """Two release branches: 1.0 leaves ``main`` in its middle, 1.1 at its end."""
    clone = TinyClone(path)
    middle = len(main) // 2
    for number, letter in enumerate(main):
        clone.commit(f"main {number}", letter)
        if number == middle:
            clone.git("branch", "old")
    for number, letter in enumerate(new):
        clone.commit(f"new {number}", letter)
    clone.git("tag", "v1.1")
    clone.git("checkout", "-q", "old")
    for number, letter in enumerate(old):
        clone.commit(f"old {number}", letter)
    clone.git("tag", "v1.0")
    return clone


@pytest.mark.parametrize(
    ("main", "old", "new", "turns", "first", "newer"),
    [
        ("GGGGBB", "GG", "BB", "bad", "main 4", True),
        ("GGGGGG", "GG", "GB", "bad", "new 1", True),
        ("BBBBBB", "BGG", "BB", "bad", "old 1", False),  # fixed only on the old branch
        ("GGGGGG", "GB", "GG", "good", "old 1", False),  # broken only there
        ("BBBBGG", "BB", "GG", "good", "main 4", True),
    ],
)
def test_releases_on_separate_branches_are_searched(
    tmp_path: Path, main: str, old: str, new: str, turns: str, first: str, newer: bool
) -> None:
    clone = branches(tmp_path / "clone", main, old, new)
    answer = named(clone, tmp_path / "out", turns)
    assert message(answer) == first
    assert answer.first is not None and answer.first.newer == newer
    assert ("on the branch of 1.0 alone" in answer.sentence()) == (not newer)


def test_source_without_the_failure_gives_no_commit(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GGGG")
    answer = named(clone, tmp_path / "out")
    assert not answer.found
    assert "does not show the failure" in answer.sentence()
    clone = from_letters(tmp_path / "skips", "GGSS")
    assert "could not be judged: skipped" in named(clone, tmp_path / "out2").sentence()


def test_the_clone_is_left_unchanged(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GGGB")
    (clone.path / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\ntouch $HOME/ran\n")
    (clone.path / ".git" / "hooks" / "post-checkout").chmod(0o755)
    before = clone.git("status", "--porcelain"), clone.git("rev-parse", "HEAD")
    named(clone, tmp_path / "out")
    assert len(clone.git("worktree", "list").splitlines()) == 1
    assert (clone.git("status", "--porcelain"), clone.git("rev-parse", "HEAD")) == before
    assert not list((tmp_path / "out").glob("source/*/tree"))


def test_an_interrupted_search_resumes(tmp_path: Path) -> None:
    class Ends(Fake):
        def probe_on(self, *args: object) -> object:  # type: ignore[override]
            if len(self.asked) == 3:
                raise Interrupted("now")
            return super().probe_on(*args)  # type: ignore[arg-type]

    clone = from_letters(tmp_path / "clone", "GGGGGBBBBB")
    first, second = Ends("GB"), Fake("GB")
    with pytest.raises(Interrupted):
        named(clone, tmp_path / "out", prober=first)
    assert len(clone.git("worktree", "list").splitlines()) == 1
    answer = named(clone, tmp_path / "out", prober=second)
    assert message(answer) == "change 5"
    asked = [s.name for s in (*first.asked, *second.asked)]
    assert answer.probes == len(asked)
    stored = states.read(tmp_path / "out").extras
    assert [r.version for r in stored] == asked
    # Files left by a killed search do no harm either.
    clone.git(
        "worktree", "add", "--detach", str(tmp_path / "out2" / "source" / asked[0][7:] / "tree")
    )
    assert message(named(clone, tmp_path / "out2")) == "change 5"


def test_the_source_folder_contains_only_the_package(tmp_path: Path) -> None:
    class Sees(Fake):
        def probe_on(self, setting, attempt):  # type: ignore[no-untyped-def]
            assert setting.source is not None
            assert [p.name for p in setting.source.iterdir()] == ["mini"]
            return super().probe_on(setting, attempt)

    clone = from_letters(tmp_path / "clone", "GB")
    assert named(clone, tmp_path / "out", prober=Sees("GB")).found


def test_obstacles_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = from_letters(tmp_path / "clone", "GB")
    clone.git("tag", "-d", "v1.1")
    answer = named(clone, tmp_path / "out")
    assert "no tag v1.1" in answer.sentence() and not answer.found
    clone.git("tag", "1.1")
    assert named(clone, tmp_path / "out2").found
    compiled = SimpleNamespace(compiled=True, tops=("mini",))
    monkeypatch.setattr(module, "installed", lambda python, name: compiled)
    with pytest.raises(UsageError, match="compiled parts"):
        tops_of("mini", {"mini": "1.0"})
    assert "compiled parts" in named(clone, tmp_path / "out3").problem
    with pytest.raises(UsageError, match="not a git repository"):
        Clone(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        Clone(tmp_path / "none")


# ------------------------------------------------------------------------ git bisect run


def git_bisect(clone: TinyClone, folder: Path) -> tuple[int, str]:
    """A real ``git bisect run`` over all of its history."""
    first = clone.git("rev-list", "--max-parents=0", "HEAD")
    clone.git("bisect", "start", "HEAD", first)
    done = subprocess.run(
        ["git", "bisect", "run", sys.executable, "-m", "tests.unit.tiny_clone", str(folder)],
        cwd=clone.path, capture_output=True, text=True,
        env={**os.environ, **PERSON, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_git_bisect_run_finds_the_commit(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GGGGGGSBB")
    status, text = git_bisect(clone, tmp_path / "state")
    # 6 cannot be imported, so git can only narrow it down to two commits.
    assert status != 0
    candidates = text.split("could be any of:")[1]
    for number, there in ((5, False), (6, True), (7, True), (8, False)):
        assert (clone.commits[f"change {number}"] in candidates) == there


def test_git_bisect_run_names_one_commit_if_all_are_decided(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GGBB")
    status, text = git_bisect(clone, tmp_path / "state")
    assert status == 0, text
    assert f"{clone.commits['change 2']} is the first bad commit" in text
    kinds = {r.version: r.verdict.kind for r in states.read(tmp_path / "state").extras}
    assert set(kinds.values()) == {Kind.GOOD, Kind.BAD}
    # The failure is learned once, and no commit is probed twice.
    again = subprocess.run(
        [sys.executable, "-m", "tests.unit.tiny_clone", str(tmp_path / "state")],
        cwd=clone.path, capture_output=True, text=True,
        env={**os.environ, **PERSON, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "probed 0" in again.stdout
    assert len(states.read(tmp_path / "state").probes) == 0


def test_uncommitted_changes_are_probed_again(tmp_path: Path) -> None:
    clone = from_letters(tmp_path / "clone", "GB")
    file = clone.path / "src" / "mini" / "__init__.py"
    for letter, expected in (("B", 1), ("G", 0), ("O", 125)):
        file.write_text(f"# {letter} edited\n", encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.tiny_clone", str(tmp_path / "state")],
            cwd=clone.path, capture_output=True, text=True,
            env={**os.environ, **PERSON, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == expected, done.stderr
