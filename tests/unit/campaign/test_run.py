"""`moediag run` without ranks: stacks when they are needed, interruption, resume, a full disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import (
    DiskFull,
    Interrupted,
    LaunchError,
    NoSuchRelease,
    StackError,
    UsageError,
)
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import ExitStatus
from moediag.lab.campaign import run as module
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.pipeline import trials
from moediag.lab.scenario import catalogue, load
from moediag.lab.scenario.plan import Plan, plan
from moediag.lab.stacks.environment import Stack
from moediag.launch.settings import LaunchOptions
from moediag.protocol import Outcome, Trial
from moediag.result import (
    RESULT_FILE,
    Confidence,
    Diagnosis,
    RunResult,
    Verdict,
    read_result,
)

UPGRADE = "5.0.0"  # the version that the variant `upgrade` keeps for itself
COMMAND = ("moediag", "run", "expert-starvation", "--cpu", "2")
VARIANTS = ["unfixed", "upgrade", "touch"]


class Ranks:
    """Stands for the launchers: every trial is clean, after ``before(its name)``. Remembers what
    was asked of it, in order."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.before = before
        self.log: list[str] = []

    def launcher(self, kind: str, stack: Stack, *_: Any) -> contextlib.AbstractContextManager[Any]:
        self.log.append(f"host {stack.key}")
        return contextlib.nullcontext(self)

    def run(self, trial: Trial, folder: Path, _: Any = None) -> LaunchRecord:
        assert not folder.exists(), "evidence is never overwritten"
        folder.mkdir(parents=True)
        trial.write(folder)
        self.log.append(trial.name)
        self.before(trial.name)
        Outcome(0).write(folder)
        record = LaunchRecord(0.0, 1.0, launcher="fork")
        record.write(folder)
        return record


@dataclasses.dataclass(frozen=True)
class Evidence:
    folder: Path
    nccl: str = "2.28.9"


@pytest.fixture(autouse=True)
def no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of fixes are clean, the others hang."""

    def diagnose(evidence: Evidence) -> Diagnosis:
        fixed = Trial.read(evidence.folder / "trial.json").role == "fix"
        verdict = Verdict.CLEAN if fixed else Verdict.COLLECTIVE_MISMATCH
        return Diagnosis(verdict, str(verdict), Confidence.HIGH, culprits=(1,) * (not fixed))

    monkeypatch.setattr(trials, "diagnose", diagnose)
    monkeypatch.setattr(trials, "read_trial", Evidence)
    monkeypatch.setattr("moediag.lab.stacks.environment.ready", lambda _: None)
    monkeypatch.setattr(module, "Ahead", Builders)


class Builders:
    """Replaces the builder that prepares environments ahead."""

    begun: list[str] = []  # noqa: RUF012

    def build(self, name: str, request: Mapping[str, str]) -> None:
        Builders.begun.append(request["transformers"])

    def end(self, name: str) -> None: ...
    def close(self) -> None: ...


def planned(variants: Sequence[str] = VARIANTS, ranks: int = 2, **stack: str) -> Plan:
    scenario = load.load(catalogue.find("expert-starvation"))
    return plan(scenario, ranks, "cpu", variants, stack_overrides=stack)


def run(
    folder: Path, ranks: Any, the_plan: Plan | None = None,
    errors: Mapping[str, StackError] | None = None,
) -> RunResult:  # fmt: skip
    """``errors``: by the version of transformers. Resumes what is in ``folder``."""
    the_plan = the_plan or planned()
    log = getattr(ranks, "log", [])

    def ensure(request: Mapping[str, str], _: Any = None) -> Stack:
        version = request["transformers"]
        log.append(f"build {version}")
        if errors and version in errors:
            raise errors[version]
        return Stack(Path("python"), dict(request), f"stack-{version}", 0.0, [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moediag.lab.stacks.environment.ensure", ensure)
        asked = module.header(the_plan, LaunchOptions(), COMMAND)
        with opened(asked, folder, (folder / JOURNAL_FILE).exists(), "s") as journal:
            options = trials.TrialOptions(launcher=ranks.launcher)
            return module.run(the_plan, journal, options, Display())


def comparable(result: RunResult) -> dict[str, Any]:
    """Returns the result without times."""
    raw = json.loads(json.dumps(result.to_json()))
    raw.pop("started")
    for trial in raw["trials"]:
        trial.pop("seconds")
    return raw


# ------------------------------------------------------------------------ stacks


def test_a_stack_is_built_when_a_trial_needs_it(tmp_path: Path) -> None:
    Builders.begun.clear()
    ranks = Ranks()
    run(tmp_path / "out", ranks, planned(["unfixed", "upgrade"]))
    own = planned().scenario.stack["transformers"]
    log = [text for text in ranks.log if not text.startswith("reference")]
    assert log == [
        f"build {own}", f"host stack-{own}", "unfixed",
        f"build {UPGRADE}", f"host stack-{UPGRADE}", "upgrade",
    ]  # fmt: skip
    assert Builders.begun[:1] == [UPGRADE], "it is built ahead while the first trial runs"


@pytest.mark.parametrize("cores", [1, 2])
def test_hosts_of_built_stacks_import_at_once_one_per_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    def ready(request: Mapping[str, str]) -> Stack:
        version = request["transformers"]
        return Stack(Path("python"), dict(request), f"stack-{version}", 0.0, [])

    monkeypatch.setattr("moediag.lab.stacks.environment.ready", ready)
    monkeypatch.setattr("moediag.hardware.cores", lambda: cores)
    ranks = Ranks()
    run(tmp_path / "out", ranks, planned(["unfixed", "touch", "zero-fill", "upgrade"]))
    own = planned().scenario.stack["transformers"]
    first = ranks.log.index("unfixed")
    hosts = [text for text in ranks.log[:first] if text.startswith("host")]
    assert hosts == [f"host stack-{own}", f"host stack-{UPGRADE}"][:cores]
    assert ranks.log.count(f"host stack-{UPGRADE}") == 1


def test_a_host_that_cannot_start_early_affects_only_its_own_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(request: Mapping[str, str]) -> Stack:
        version = request["transformers"]
        return Stack(Path("python"), dict(request), f"stack-{version}", 0.0, [])

    class NoUpgrade(Ranks):
        def launcher(self, kind: str, stack: Stack, *_: Any) -> Any:
            if stack.key.endswith(UPGRADE) and "unfixed" not in self.log:
                raise LaunchError("no memory for two hosts")
            return super().launcher(kind, stack)

    monkeypatch.setattr("moediag.lab.stacks.environment.ready", ready)
    monkeypatch.setattr("moediag.hardware.cores", lambda: 2)
    result = run(tmp_path / "out", NoUpgrade(), planned(["unfixed", "upgrade"]))
    assert [trial.variant for trial in result.trials] == ["unfixed", "upgrade"]


class NoRanks(Ranks):
    def run(self, trial: Trial, folder: Path, _: Any = None) -> LaunchRecord:
        raise LaunchError("no ranks here")


def test_a_requested_release_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRelease, match="no 99"):
        run(tmp_path, Ranks(), planned(transformers="99"), {"99": NoSuchRelease("no 99")})
    saved = read_result(tmp_path)
    assert (saved.trials, saved.incomplete) == ((), "ended by an error: no 99")


def test_an_unavailable_stack_affects_only_its_own_trials(tmp_path: Path) -> None:
    errors = {UPGRADE: NoSuchRelease("withdrawn")}
    result = run(tmp_path, NoRanks(), planned(["unfixed", "upgrade"]), errors)
    causes = [(t.variant, t.cause) for t in result.trials]
    assert causes == [("unfixed", "no ranks here"), ("upgrade", "withdrawn")]


def test_no_available_stack_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    the_plan = planned(["unfixed", "upgrade"])
    own = the_plan.trials[0].stack["transformers"]
    errors = {own: StackError("no network for the first"), UPGRADE: StackError("nor the second")}
    with pytest.raises(StackError, match="for the first"):
        run(tmp_path, Ranks(), the_plan, errors)


def test_no_successful_launch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no ranks here"):
        run(tmp_path, NoRanks(), planned(["unfixed"]))


# ------------------------------------------------------------------------ resume


def ending(at: int, error: BaseException) -> Ranks:
    """Raises ``error`` in the ``at``-th launch, counted from 0, references included."""
    count = iter(range(100))

    def before(_: str) -> None:
        if next(count) == at:
            raise error

    return Ranks(before)


def launches() -> int:
    return len(planned().trials) + 2  # two stacks with a reference each


def test_an_interrupted_run_saves_a_result_and_prints_how_to_resume(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after 1 of 4 trials") as caught:
        run(tmp_path, ending(2, KeyboardInterrupt()))
    saved = read_result(tmp_path)
    assert saved.incomplete == "interrupted after 1 of 4 trials"
    assert saved.conclusion.cheapest_correct_fix is None
    line = caught.value.help_text.partition("\nTo resume: ")[2]
    assert shlex.split(line) == [*COMMAND, "--out", str(tmp_path), "--resume"]


def test_the_result_is_on_disk_after_each_trial(tmp_path: Path) -> None:
    """A run that is killed has a result, which says that it is unfinished."""
    seen: list[tuple[int, str]] = []

    def look(name: str) -> None:
        if (tmp_path / RESULT_FILE).exists():
            found = read_result(tmp_path)
            seen.append((len(found.trials), found.incomplete))

    whole = run(tmp_path, Ranks(look))
    assert (1, "1 of 4 trials finished") in seen
    assert max(seen) == (3, "3 of 4 trials finished")
    assert whole.incomplete == read_result(tmp_path).incomplete == ""


@pytest.mark.parametrize("at", range(launches()))
def test_a_run_resumed_after_any_trial_has_the_same_result(tmp_path: Path, at: int) -> None:
    """Trials and references that were finished do not run again."""
    whole = run(tmp_path / "whole", Ranks())
    first, second = ending(at, KeyboardInterrupt()), Ranks()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", first)
    again = run(tmp_path / "parts", second)
    assert comparable(again) == comparable(whole)
    done = [t for t in first.log[:-1] if t.split()[0] not in ("build", "host")]
    assert not set(done) & set(second.log)
    left = first.log[-1]
    assert (tmp_path / "parts" / "interrupted" / f"{left}-1" / "trial.json").is_file()
    assert comparable(run(tmp_path / "parts", Ranks())) == comparable(whole)  # nothing remains


@pytest.mark.parametrize("torn", [1, 20])
def test_a_run_killed_during_a_write_loses_only_that_trial(tmp_path: Path, torn: int) -> None:
    """Simulates SIGKILL at any moment: the journal ends anywhere and no other file was written."""
    whole = run(tmp_path / "whole", Ranks())
    data = (tmp_path / "whole" / JOURNAL_FILE).read_bytes()
    lines = data.splitlines(keepends=True)
    for number in range(len(lines)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        kept = b"".join(lines[:number]) + lines[number][:-torn]
        (folder / JOURNAL_FILE).write_bytes(kept)
        ranks = Ranks()
        assert comparable(run(folder, ranks)) == comparable(whole)
        assert len(ranks.log) > 0 or torn == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_disk_that_is_full_or_fails_keeps_finished_trials(tmp_path: Path, code: int) -> None:
    full = OSError(code, os.strerror(code))
    with pytest.raises(DiskFull, match="1 of 4 trials are finished and kept") as caught:
        run(tmp_path / "parts", ending(2, full))
    assert caught.value.help_text.endswith("--resume")
    assert [t.variant for t in read_result(tmp_path / "parts").trials] == ["unfixed"]
    assert comparable(run(tmp_path / "parts", Ranks())) == comparable(run(tmp_path / "w", Ranks()))


class Killed(Ranks):
    """References end like ``record`` and leave no outcome."""

    def __init__(self, **record: Any) -> None:
        super().__init__()
        self.record = record

    def run(self, trial: Trial, folder: Path, _: Any = None) -> LaunchRecord:
        if trial.name.startswith("reference"):
            folder.mkdir(parents=True)
            return LaunchRecord(0.0, 1.0, **self.record)
        return super().run(trial, folder)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"exits": {0: ExitStatus(signal="SIGKILL")}, "oom_kills": 1}, "it was killed for memory"),
        ({"exits": {0: ExitStatus(signal="SIGKILL")}, "oom_kills": 0}, "it was ended by SIGKILL"),
        ({"exits": {0: ExitStatus(code=1)}}, "it left no output"),
    ],
)
def test_a_failed_reference_says_why(tmp_path: Path, record: dict[str, Any], why: str) -> None:
    result = run(tmp_path, Killed(**record), planned(["unfixed"]))
    assert why in result.trials[0].cause


def test_an_outcome_that_is_shown_late_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a network file system, after a rank that ended well."""
    whole = LaunchRecord(0.0, 1.0, exits={0: ExitStatus(code=0), 1: ExitStatus(code=1)})
    waits: list[float] = []

    def shows(seconds: float) -> None:
        waits.append(seconds)
        Outcome(0).write(tmp_path)

    monkeypatch.setattr(trials.time, "sleep", shows)
    trials._await_outcomes(tmp_path, whole)
    trials._await_outcomes(tmp_path, whole)
    assert len(waits) == 1
    monkeypatch.setattr(trials, "_LATE", 0.0)
    trials._await_outcomes(tmp_path / "none", whole)  # it was never written


def test_a_launcher_that_died_below_every_reference_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not enough memory"):
        run(tmp_path, Killed(launch_error="not enough memory"), planned(["unfixed"]))
    assert [found.variant for found in read_result(tmp_path).trials] == ["unfixed"]


def test_a_launch_that_failed_on_a_full_disk_proves_nothing(tmp_path: Path) -> None:
    def fill(name: str) -> None:
        if name == "touch":
            (tmp_path / trials.SPACE_FILE).symlink_to("/dev/full")

    with pytest.raises(DiskFull, match="no space left on device"):
        run(tmp_path, Ranks(fill))
    assert "touch" not in [t.variant for t in read_result(tmp_path).trials]
    assert comparable(run(tmp_path, Ranks())) == comparable(run(tmp_path / "w", Ranks()))


def test_a_failed_launch_is_repeated_on_resume(tmp_path: Path) -> None:
    first = run(tmp_path, Ranks(), errors={UPGRADE: StackError("no network")})
    assert "no network" in [t.cause for t in first.trials]
    again = run(tmp_path, ranks := Ranks())
    assert "no network" not in [t.cause for t in again.trials]
    assert "upgrade" in ranks.log and "unfixed" not in ranks.log


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (lambda: planned(["unfixed"]), "trials: "),
        (lambda: planned(ranks=4), "number of ranks: 2, not 4"),
        (lambda: planned(transformers="4.50.0"), "overrides: none, not --stack transform"),
        (lambda: plan(load.load(catalogue.find("ep-clip-norm")), 2, "cpu"), "scenario: "),
    ],
)
def test_another_question_is_refused_with_the_difference(
    tmp_path: Path, other: Callable[[], Plan], differs: str
) -> None:
    run(tmp_path, Ranks())
    with pytest.raises(UsageError, match=differs) as caught:
        run(tmp_path, Ranks(), other())
    assert "To resume that one: moediag run expert-starvation" in caught.value.help_text


def test_an_edited_scenario_is_another_question(tmp_path: Path) -> None:
    run(tmp_path, Ranks())
    edited = planned()
    title = edited.scenario.model_copy(update={"title": "another"})
    with pytest.raises(UsageError, match="the scenario expert-starvation was different then"):
        run(tmp_path, Ranks(), dataclasses.replace(edited, scenario=title))


# ------------------------------------------------------------------------ seconds


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_trial_time_does_not_include_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def tick(name: str) -> None:
        clock.now += 100.0 if name.startswith("reference") else 2.0

    monkeypatch.setattr(trials, "time", clock)
    result = run(tmp_path / "out", Ranks(tick), planned(["unfixed", "touch"]))
    seconds = [(t.seconds.total, t.seconds.reference) for t in result.trials[:2]]
    assert seconds == [(2.0, 100.0), (2.0, None)]
    assert read_result(tmp_path / "out").trials[0].seconds.reference == 100.0
