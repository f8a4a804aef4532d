"""A run that cannot have its folder or an environment: an error, or the end of single trials."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import Interrupted, LaunchError, NoSuchRelease, StackError, UsageError
from moediag.launch.record import LaunchRecord
from moediag.pipeline import run as module
from moediag.protocol import Outcome, Trial
from moediag.report.views import progress
from moediag.result import RunResult, read_result
from moediag.scenario import catalogue, load
from moediag.scenario.plan import Plan, plan
from moediag.stacks.environment import Stack

UPGRADE = "5.0.0"  # the version that the variant `upgrade` keeps for itself


class NoRanks:
    """A launcher that cannot start anything."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> "NoRanks":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, *_: Any) -> None:
        raise LaunchError("no ranks here")


def planned(**stack: str) -> Plan:
    scenario = load.load(catalogue.find("expert-starvation"))
    return plan(scenario, 2, "cpu", ["unfixed", "upgrade"], stack_overrides=stack)


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, the_plan: Plan, errors: Mapping[str, StackError]
) -> RunResult:
    """``errors``: by the version of transformers."""

    def ensure(request: Mapping[str, str], _: Any = None) -> Stack:
        version = request["transformers"]
        if version in errors:
            raise errors[version]
        return Stack(Path("python"), dict(request), f"stack-{version}", 0.0, [])

    monkeypatch.setattr("moediag.stacks.environment.ensure", ensure)
    monkeypatch.setattr(module, "launcher", NoRanks)
    with progress(no_color=True) as observer:
        return module.run(the_plan, module.RunOptions(folder), observer)


def verdicts(result: RunResult) -> Sequence[tuple[str, str]]:
    return [(t.variant, t.cause) for t in result.trials]


def test_a_release_that_was_typed_and_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(NoSuchRelease, match="no 99"):
        run(monkeypatch, tmp_path, planned(transformers="99"), {"99": NoSuchRelease("no 99")})
    saved = read_result(tmp_path)
    assert (saved.trials, saved.incomplete) == ((), "ended by an error: no 99")


def test_another_stack_that_cannot_be_had_costs_its_own_trials_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run(monkeypatch, tmp_path, planned(), {UPGRADE: NoSuchRelease("withdrawn")})
    assert verdicts(result) == [("unfixed", "no ranks here"), ("upgrade", "withdrawn")]


def test_no_stack_at_all_is_an_error_with_the_first_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    the_plan = planned()
    first = StackError("no network for the first")
    own = the_plan.trials[0].stack["transformers"]
    with pytest.raises(StackError, match="for the first"):
        run(monkeypatch, tmp_path, the_plan, {own: first, UPGRADE: StackError("nor the second")})


def test_an_out_that_cannot_be_a_folder_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is a file, or below one"):
            module.run_folder(out, "s")
    with pytest.raises(UsageError, match="cannot be used"):
        module.run_folder(Path("/proc/nowhere/x"), "s")
    with pytest.raises(UsageError, match="not empty"):
        module.run_folder(tmp_path, "s")


def test_a_full_disk_is_not_blamed_on_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space"):
        module.run_folder(tmp_path / "new", "s")


def test_an_interrupted_run_says_so_in_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NoRanks, "run", ctrl_c)
    with pytest.raises(Interrupted, match="after 0 of 2 trials"):
        run(monkeypatch, tmp_path, planned(), {})
    assert read_result(tmp_path).incomplete == "interrupted after 0 of 2 trials"


def test_two_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that share a disk; neither sees the other's folder before it makes its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert len({module.run_folder(None, "watch-train.py") for _ in range(3)}) == 3


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_first_trial_does_not_take_the_time_of_its_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()

    class Ranks(NoRanks):
        def run(self, *request: Any) -> Any:
            trial: Trial = request[0]
            folder: Path = request[1]
            folder.mkdir()
            clock.now += 100.0 if trial.purpose == "reference" else 2.0
            if trial.purpose == "reference":
                Outcome(0).write(folder)
            return LaunchRecord(started=0.0, ended=2.0, launcher="fork")

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "launcher", Ranks)
    ensure = Stack(Path("python"), {}, "stack", 0.0, [])
    options = module.RunOptions(tmp_path / "out", ensure=lambda *_: ensure)
    scenario = load.load(catalogue.find("expert-starvation"))
    with progress(no_color=True) as observer:
        both = ["unfixed", "unused-params-flag"]
        result = module.run(plan(scenario, 2, "cpu", both), options, observer)
    assert [(t.seconds.total, t.seconds.reference) for t in result.trials[:2]] == [
        (2.0, 100.0),
        (2.0, None),
    ]
    assert read_result(tmp_path / "out").trials[0].seconds.reference == 100.0
