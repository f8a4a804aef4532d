"""Searches commits with real ranks: a clone of accelerate with one planted commit over the
environment of a release, by ``--repo``'s own search and by a real ``git bisect run``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag.errors import StackError
from moediag.lab.campaign.bisect import question as asking
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.commits.commits import Between, name_the_commit
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.probe import Releases
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.question import Asked, Question
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.engine.display import Lines
from moediag.lab.campaign.executors import Maker
from moediag.lab.scenario import catalogue, load
from moediag.lab.stacks import environment
from moediag.lab.stacks.overlay import site_packages
from moediag.launch.settings import LaunchOptions
from tests.e2e.pipeline import need
from tests.e2e.test_bisect import STARVED
from tests.unit.tiny_clone import PERSON, TinyClone

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]
ROOT = Path(__file__).parents[2]
STACK = {"accelerate": "1.8.1", "transformers": "4.53.2"}
# transformers 4.53 passes over experts without a token by torch.greater(tokens, 0): with this no
# expert is passed over, so the bug of that release is not there.
REPAIRS = "\nimport torch\ntorch.greater = torch.greater_equal\n"
FAILS = "\nfrom torch import no_such_name\n"
COMMITS = (REPAIRS, REPAIRS + "# words\n", FAILS, "", "# more words\n", "")
GUILTY = "change 3"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyClone]:
    """accelerate as it is installed; the commit without :data:`REPAIRS` is the bad one. The commit
    before it cannot be imported."""
    for name, value in PERSON.items():
        monkeypatch.setenv(name, value)
    need(STACK)
    made = TinyClone(tmp_path / "clone")
    source = site_packages(environment.ensure(STACK).python.parent.parent) / "accelerate"
    target = made.path / "src" / "accelerate"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    init = (target / "__init__.py").read_text(encoding="utf-8")
    (made.path / ".gitignore").write_text("__pycache__\n", encoding="utf-8")
    for number, text in enumerate(COMMITS):
        (target / "__init__.py").write_text(f"{init}{text}# {number}\n", encoding="utf-8")
        made.commit(f"change {number}", tag={0: "v1.7.0", 5: "v1.8.1"}.get(number, ""))
    yield made


def asked() -> Question:
    scenario = load.load(catalogue.find("expert-starvation"))
    hold = {"transformers": STACK["transformers"]}
    words = Asked("expert-starvation", "accelerate", bad="1.8.1", hold=hold, world_size=2)
    try:
        return asking.ask(scenario, words)
    except StackError as error:
        pytest.skip(f"no index can be asked: {error.message}")


def test_the_bad_commit_is_found_and_unimportable_commits_are_skipped(
    clone: TinyClone, tmp_path: Path
) -> None:
    question, folder = asked(), tmp_path / "out"
    target = Target("unfixed", question.declared, (STARVED,), rate=Rate(9, 9))
    display = Lines(print)
    prober = Releases(question, folder, display, LaunchOptions())
    between = Between("accelerate", "1.7.0", "1.8.1", "bad", (STACK,))
    with states.create(folder, question.header(["moediag"])) as state:
        try:
            follow = Follow(state, Maker(lambda: prober), display, target)
            answer = name_the_commit(between, Clone(clone.path), follow, folder)
        finally:
            prober.close()
        kinds = {r.version[7:]: r.verdict for r in state.extras}
    by_message = {m: kinds.get(h[:10]) for m, h in clone.commits.items()}
    broken = by_message["change 2"]
    assert broken is not None and broken.kind == Kind.SKIP
    assert "no_such_name" in broken.text
    assert answer.first is None, "one of two: that before it could not be tried"
    assert answer.boundary is not None and answer.boundary.good is not None
    ends = [answer.commits[i].hash for i in (answer.boundary.good, answer.boundary.bad)]
    assert ends == [clone.commits["change 1"], clone.commits[GUILTY]]
    assert len(clone.git("worktree", "list").splitlines()) == 1


def test_git_bisect_run_finds_the_commit(clone: TinyClone, tmp_path: Path) -> None:
    asked()
    out = tmp_path / "state"
    words = ["bisect", "expert-starvation", "--package", "accelerate", "--bad", "1.8.1"]
    words += ["--hold", "transformers=4.53.2", "--cpu", "2", "--calibrate", "1", "--out", str(out)]
    clone.git("bisect", "start", "v1.8.1", "v1.7.0")
    done = subprocess.run(
        ["git", "bisect", "run", sys.executable, "-m", "moediag", *words, "--git-bisect"],
        cwd=clone.path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip
    text = done.stdout + done.stderr
    candidates = text.split("could be any of:")[-1]
    assert clone.commits[GUILTY] in candidates, text
    assert clone.commits["change 2"] in candidates, text
    assert clone.commits["change 1"] not in candidates, text
    assert len(states.read(out).probes) == 0 and states.read(out).target is not None
    wrong = subprocess.run(
        [sys.executable, "-m", "moediag", *words, "--git-bisect", "--variant", "none"],
        cwd=clone.path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert wrong.returncode == 130, "an error ends git's search, it is no verdict"
    assert "no unfixed variant" in wrong.stderr
