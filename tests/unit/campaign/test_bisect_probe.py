"""Probes with replaced runs: what is learned, judged and skipped, and why."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from moediag.errors import Interrupted, LaunchError, NoEnvironments, StackError
from moediag.lab.campaign import prebuild as builders
from moediag.lab.campaign.bisect import probe as module
from moediag.lab.campaign.bisect.probe import Releases, TooRare
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.prober import Probed
from moediag.lab.campaign.bisect.question import Asked, Question, Setting
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.prebuild import Ahead
from moediag.lab.scenario import catalogue, load
from moediag.lab.scenario.plan import Plan
from moediag.lab.stacks.environment import Stack
from moediag.lab.stacks.releases import Release
from moediag.launch.settings import LaunchOptions
from moediag.result import Conclusion, RunResult, TrialResult
from tests.unit.bisect_fakes import STARVED, TARGET
from tests.unit.campaign.test_bisect_signatures import trial

ROOT = Path(__file__).parents[3]
Trials = Callable[[Plan], Sequence[TrialResult]]


class World:
    """Stands for environments and runs. ``signatures``: of the unfixed trials, in turn; ``fails``:
    raised instead of building; ``stack``: what the ranks report."""

    def __init__(self) -> None:
        self.signatures: list[str] = [STARVED]
        self.control = "clean"
        self.fails: BaseException | None = None
        self.run_fails: BaseException | None = None
        self.stack: dict[str, str | None] = {}
        self.requests: list[Mapping[str, str]] = []
        self.folders: list[str] = []
        self.noting: list[bool] = []

    def ensure(self, request: Mapping[str, str], progress: Any = None) -> None:
        self.requests.append(request)
        if self.fails:
            raise self.fails

    def run(self, plan: Plan, journal: Any, options: Any, observer: Any) -> RunResult:
        if self.run_fails:
            raise self.run_fails
        self.folders.append(journal.folder.name)
        self.noting.append(any(planned.trial.executed for planned in plan.trials))
        assert [path.name for path in journal.folder.iterdir()] == [JOURNAL_FILE]
        found = []
        for number, planned in enumerate(plan.trials):
            role, variant = planned.trial.role, planned.trial.variant
            own = self.signatures[number % len(self.signatures)]
            row = trial(own if role == "unfixed" else self.control, role, variant)
            found.append(dataclasses.replace(row, stack=self.stack))
        conclusion = Conclusion(reproduced=None)
        return RunResult("s", "", "0", {}, tuple(found), conclusion)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(module.environment, "ensure", found.ensure)
    monkeypatch.setattr(module.runner, "run", found.run)
    return found


def prober(folder: Path, scenario: str = "expert-starvation", **pins: str) -> Releases:
    loaded = load.load(catalogue.find(scenario))
    names = ["unfixed", *(n for n, v in loaded.variants.items() if v.role == "control")][:2]
    variants = {n: loaded.variants[n] for n in names}
    reduced = loaded.model_copy(update={"variants": variants, "stack": {}, "cost": None})
    question = Question(
        reduced, "unfixed", "transformers", pins, (Release("4.53.0"), Release("4.53.2")),
        "4.53.2", None, "3.11", Asked(),
    )  # fmt: skip
    return Releases(question, folder, Display(), LaunchOptions())


def learn(used: Releases, version: str) -> Probed:
    return used.probe(used.question.setting(version), 1, None)


def probe(used: Releases, version: str, attempt: int, target: Target) -> ProbeRecord:
    return used.probe(used.question.setting(version), attempt, target).record


def test_the_failure_is_learned_with_its_rate(world: World, tmp_path: Path) -> None:
    world.signatures = [STARVED, "clean", STARVED]
    found = learn(prober(tmp_path), "4.53.2")
    assert found.target is not None
    assert (found.target.signatures, found.target.rate) == ((STARVED,), Rate(2, 3))
    assert (found.record.verdict.kind, found.record.attempt) == (Kind.BAD, 1)
    assert found.record.signature == f"{STARVED}; clean"
    assert (tmp_path / found.record.evidence).is_dir()
    world.signatures = ["clean"]
    record = probe(prober(tmp_path), "4.53.0", 1, found.target)
    assert (record.verdict.kind, record.verdict.trials) == (Kind.GOOD, Rate(2, 3).repeats())


def test_only_second_probes_record_which_functions_run(world: World, tmp_path: Path) -> None:
    releases = prober(tmp_path)
    learn(releases, "4.53.2")
    for attempt in (1, 2):
        probe(releases, "4.53.0", attempt, TARGET)
    releases.probe(Setting("other", ({"transformers": "4.53.0"},)), 1, TARGET)
    assert world.noting == [False, False, True, False]


def test_hosts_of_built_settings_begin_before_their_probes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ready(request: Mapping[str, str]) -> Stack | None:
        version = request["transformers"]
        built = Stack(Path("python"), dict(request), version, 0.0, [])
        return built if version != "4.53.3" else None

    monkeypatch.setattr(module.environment, "ready", ready)
    releases = prober(tmp_path)
    begun: list[str] = []
    built: list[str] = []
    monkeypatch.setattr(releases.hosts, "begin", lambda stack: begun.append(stack.key))
    monkeypatch.setattr(releases.ahead, "build", lambda name, request: built.append(name))
    releases.prepare(
        [
            Setting("ready", ({"transformers": "4.53.0"},)),
            Setting("with another source", ({"transformers": "4.53.1"},), tmp_path),
            Setting("not built", ({"transformers": "4.53.3"},)),
        ]
    )
    assert (begun, built) == (["4.53.0"], ["not built"])


def test_another_failure_than_the_declared_one_is_not_learned(world: World, tmp_path: Path) -> None:
    world.signatures = ["crash:KeyError:other.py load:one-rank"]
    found = learn(prober(tmp_path), "4.53.2")
    assert found.target is None
    assert found.record.verdict.kind == Kind.OTHER
    assert "crash:KeyError" in found.problem
    world.signatures = ["clean"]
    assert learn(prober(tmp_path), "4.53.2").record.verdict.kind == Kind.GOOD


def test_a_failure_without_the_declared_pattern_is_not_learned(
    world: World, tmp_path: Path
) -> None:
    found = []
    for pattern in ("one-slice-sharded-again", "another-thing"):
        world.signatures = [f"wrong-weights:{pattern}:no-rank"]
        found.append(learn(prober(tmp_path, "ep-overwrite"), "4.53.2"))
    assert prober(tmp_path, "ep-overwrite").question.pattern == "one-slice-sharded-again"
    assert [learned.target is not None for learned in found] == [True, False]


def test_changed_companions_are_reported(world: World, tmp_path: Path) -> None:
    world.signatures = ["clean"]
    world.stack = {"transformers": "4.53.2", "accelerate": "1.8.1"}
    problem = learn(prober(tmp_path, accelerate="1.15.0"), "4.53.2").problem
    assert "ran with accelerate 1.8.1" in problem
    assert "--hold accelerate=1.15.0" in problem


def test_a_too_rare_failure_is_reported(world: World, tmp_path: Path) -> None:
    world.signatures = [STARVED, *["clean"] * 99]
    rare = prober(tmp_path)
    asked = dataclasses.replace(rare.question.asked, calibrate=100)
    rare.question = dataclasses.replace(rare.question, asked=asked)
    with pytest.raises(TooRare, match="1 of 100 trials"):
        learn(rare, "4.53.2")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StackError("tokenizers has no wheel\nfor this Python"), "no wheel for this Python"),
        (LaunchError("the launcher's host died"), "the launcher's host died"),
    ],
)
def test_a_release_that_cannot_be_tried_is_skipped_with_its_reason(
    world: World, tmp_path: Path, error: Exception, text: str
) -> None:
    if isinstance(error, StackError):
        world.fails = error
    else:
        world.run_fails = error
    for record in (
        probe(prober(tmp_path), "4.53.0", 1, TARGET),
        learn(prober(tmp_path), "4.53.2").record,
    ):
        assert record.verdict.kind == Kind.SKIP
        assert text in record.verdict.text
        assert record.lasting == isinstance(error, StackError)
        assert "\n" not in record.verdict.text


@pytest.mark.parametrize(
    ("seen", "kind", "lasting"),
    [
        (STARVED, Kind.BAD, True),
        ("not-applicable", Kind.SKIP, True),
        ("inconclusive", Kind.SKIP, False),
    ],
)
def test_a_probe_that_could_not_be_judged_does_not_last(
    world: World, tmp_path: Path, seen: str, kind: Kind, lasting: bool
) -> None:
    world.signatures = [seen]
    record = probe(prober(tmp_path), "4.53.0", 1, TARGET)
    assert (record.verdict.kind, record.lasting) == (kind, lasting)


def test_the_next_environment_is_tried_only_if_the_first_is_undecided(
    world: World, tmp_path: Path
) -> None:
    old, new = {"transformers": "4.53.0"}, {"transformers": "4.53.2"}
    setting = Setting("commit abc", (old, new), tmp_path / "source")
    record = prober(tmp_path).probe(setting, 2, TARGET).record
    assert (record.version, record.attempt, record.verdict.kind) == ("commit abc", 2, Kind.BAD)
    assert world.requests == [old]
    assert world.folders == ["commit-abc"]
    world.control = "crash:ImportError:x.py f:one-rank"  # newer code needs newer companions
    record = prober(tmp_path).probe(setting, 1, TARGET).record
    assert record.verdict.kind == Kind.SKIP
    assert world.requests == [old, old, new]
    world.signatures, world.control = ["crash:KeyError:x.py f:one-rank"], "clean"
    record = prober(tmp_path).probe(setting, 1, TARGET).record
    assert record.verdict.kind == Kind.OTHER, "it ran: the next environment is not asked"
    assert world.requests[3:] == [old]


def test_a_stopped_prober_can_be_used_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def builds(request: Mapping[str, str], progress: Any) -> None:
        progress("downloading", None)

    monkeypatch.setattr(module.environment, "ensure", builds)
    used = prober(tmp_path)
    used.stop()
    with pytest.raises(Interrupted):
        probe(used, "4.53.0", 1, TARGET)
    used.close()
    setting = Setting("commit abc", ({"transformers": "4.53.0"},))
    assert used.probe(setting, 1, TARGET).record.verdict.kind == Kind.BAD


def test_source_is_imported_before_the_installed_package(tmp_path: Path) -> None:
    stack = Stack(
        python=Path("bin/python"), versions={"mini": "1.0"}, key="mini-1.0-x", seconds=0.0,
        pythonpath=[tmp_path / "rank"],
    )  # fmt: skip
    over = module.overlay(stack, tmp_path / "source", "commit abc", "mini")
    path = os.pathsep.join([str(tmp_path / "source"), str(tmp_path / "rank")])
    assert over.environ({})["PYTHONPATH"] == path
    assert over.key != stack.key, "no process that imported the release is used for it"
    assert over.versions["mini"] == "commit abc, on 1.0"
    assert "not what is installed (1.0)" in over.notes[0]


def test_an_obstacle_to_every_release_is_an_error(world: World, tmp_path: Path) -> None:
    world.fails = NoEnvironments("no network")
    with pytest.raises(NoEnvironments):
        probe(prober(tmp_path), "4.53.0", 1, TARGET)
    world.fails = KeyboardInterrupt()
    with pytest.raises(Interrupted):
        probe(prober(tmp_path), "4.53.0", 1, TARGET)


def test_a_control_that_fails_skips_the_release(world: World, tmp_path: Path) -> None:
    world.control = "crash:OSError:x.py f:one-rank"
    record = probe(prober(tmp_path), "4.53.0", 1, TARGET)
    assert record.verdict.kind == Kind.SKIP


def test_files_of_an_interrupted_probe_are_kept(world: World, tmp_path: Path) -> None:
    (tmp_path / module.PROBES / "4.53.0").mkdir(parents=True)
    (tmp_path / module.PROBES / "4.53.0" / "half").touch()
    for attempt in (1, 2):
        probe(prober(tmp_path), "4.53.0", attempt, TARGET)
    assert world.folders == ["4.53.0-2", "4.53.0-3"]
    assert (tmp_path / module.PROBES / "4.53.0" / "half").exists()


def test_a_stopped_probe_ends_while_it_builds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def builds(request: Mapping[str, str], progress: Any) -> None:
        while True:
            progress("downloading", None)
            time.sleep(0.01)

    monkeypatch.setattr(module.environment, "ensure", builds)
    stopped = prober(tmp_path)
    ended = []

    def work() -> None:
        try:
            probe(stopped, "4.53.0", 1, TARGET)
        except Interrupted as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    stopped.stop()
    thread.join(30)
    assert ended


# ------------------------------------------------------------------------ built ahead

# In place of the environment's making: says that it began, then takes for ever.
BUILDER = """
import sys, time
from pathlib import Path
from moediag.lab.stacks import environment

def ensure(request, progress=None):
    Path(request["transformers"]).touch()
    time.sleep(600)

environment.ensure, environment.ready = ensure, lambda request: None
from moediag.lab.campaign import prebuild as ahead
sys.exit(ahead.main(sys.argv[-1]))
"""


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Any]]:
    """Makes builders run BUILDER; called with a name it waits until that one has begun."""
    script = tmp_path / "builder.py"
    script.write_text(BUILDER, encoding="utf-8")
    started: list[Any] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, str(script), command[-1]]
        started.append(popen(words, cwd=tmp_path, env=environ, **options))
        return started[-1]

    monkeypatch.setattr(builders.subprocess, "Popen", start)

    def begun(name: str) -> list[Any]:
        deadline = time.monotonic() + 60
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, "the builder never began"
            time.sleep(0.02)
        return started

    return begun


def test_two_environments_are_built_at_once_and_each_only_once(
    building: Callable[[str], list[Any]],
) -> None:
    work = Ahead()
    try:
        for name in ("a", "b", "a", "c"):
            work.build(name, {"transformers": name})
        building("a")
        assert len(building("b")) == 2
        assert work.working() == ["a", "b"]
        work.end("a")
        assert work.working() == ["b"]
        work.build("c", {"transformers": "c"})
        building("c")
    finally:
        work.close()
    assert work.working() == []


def test_a_builder_ends_with_its_parent(
    building: Callable[[str], list[Any]],
) -> None:
    """The pipe to it is closed, as it is when the parent is killed."""
    work = Ahead()
    work.build("x", {"transformers": "x"})
    (builder,) = building("x")
    process = psutil.Process(builder.pid)
    builder.stdin.close()
    assert process.wait(30) in (1, None)
    work.close()
