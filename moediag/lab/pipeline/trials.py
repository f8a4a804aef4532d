"""The trials of a plan, one at a time: stack -> launch -> evidence -> diagnosis -> row.

This module knows no particular failure. Environments, hosts and references are created when the
first trial needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import moediag
from moediag.diagnosis import diagnose
from moediag.errors import (
    DiskFull,
    LaunchError,
    NodeLost,
    NoSuchRelease,
    StackError,
    UsageError,
    says_disk_full,
)
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.trial_folder import read_trial
from moediag.lab.launch.launcher import launcher
from moediag.lab.launch.rendezvous import Meeting
from moediag.lab.launch.several_nodes import BROKEN_OFF
from moediag.lab.pipeline import planned_rows
from moediag.lab.pipeline.observer import Observer, glance
from moediag.lab.scenario.plan import Plan, PlannedTrial
from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack
from moediag.launch.base import Launcher
from moediag.launch.settings import LaunchOptions, Progress
from moediag.protocol import CostTask, Outcome, ReferenceTask, ResumeTask, outcome_file, output_file
from moediag.records import dataclass
from moediag.result import Seconds, TrialResult, Verdict, wording

# (kind, stack, run directory, options) -> context manager
GiveLauncher = Callable[
    [str, Stack, Path, LaunchOptions], contextlib.AbstractContextManager[Launcher]
]
GiveStack = Callable[[Mapping[str, str], Callable[[str, float | None], None]], Stack]
INTERRUPTED = "interrupted"  # folder of the files of interrupted trials
SPACE_FILE = ".space"
_LATE = 3.0  # seconds for a file of another process to appear
_SPACE = 1 << 18  # bytes; the evidence of one trial needs about as many


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Options of all trials of a run."""

    launch: LaunchOptions = field(default_factory=LaunchOptions)
    launcher: GiveLauncher | None = None
    """Returns launchers that may outlive the run; default: the run's own."""
    ensure: GiveStack | None = None
    """Returns environments; default: stacks.environment."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A single-process run that trials are compared with."""

    path: Path
    verdict: Verdict | None = None
    """None, or the verdict of every trial that needs this reference."""
    reason: str = ""
    """The reason for that verdict."""
    launch_error: str = ""
    """Why its process could not be launched."""


class References(Protocol):
    """The computed references, by name."""

    def get(self, name: str) -> Reference | None: ...

    def add(self, name: str, value: Reference) -> None: ...


def in_order(plan: Plan) -> list[PlannedTrial]:
    """Returns the trials grouped by requested stack, in the plan's order. Timed trials come last,
    when no other host is importing."""
    groups: dict[tuple[bool, tuple[tuple[str, str], ...]], list[PlannedTrial]] = {}
    for planned in plan.trials:
        late = isinstance(planned.trial.task, CostTask)
        groups.setdefault((late, _request(planned)), []).append(planned)
    return [p for key in sorted(groups, key=lambda key: key[0]) for p in groups[key]]


class Trials:
    """Runs trials; a context manager. ``references``: existing and new ones."""

    def __init__(
        self, plan: Plan, folder: Path, options: TrialOptions, observer: Observer,
        references: References,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.observer = observer
        self.folder = folder
        families = {t.trial.model.family for t in plan.trials}
        self.launcher = options.launcher or launcher
        self.ensure = options.ensure or environment.ensure
        self.launch_options = dataclasses.replace(options.launch, families=tuple(sorted(families)))
        self.references = references
        self.stacks: dict[tuple[tuple[str, str], ...], Stack | StackError] = {}
        self.launch_errors: list[LaunchError] = []
        self.meeting: Meeting | None = None
        self._launchers: dict[tuple[str, str], Launcher] = {}
        self._hosts = contextlib.ExitStack()

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with contextlib.suppress(NodeLost):  # everything is done
                    self._meet()
        finally:
            self._hosts.close()

    def run(self, planned: PlannedTrial) -> TrialResult:
        """Runs a trial and returns its result. Raises Interrupted and KeyboardInterrupt, NodeLost,
        and StackError if no environment of the plan can be built or one was mistyped."""
        if self.meeting is None:
            self._join()
        stack = self._stack(planned.stack)
        if isinstance(stack, StackError):
            self._meet(stack.message)
            return planned_rows.not_built(planned, stack)
        return self._one(planned, stack, self._launcher(planned, stack))

    def warm(self, planned: PlannedTrial) -> bool:
        """Starts the host of a trial that comes soon. Returns False if its environment is not
        built."""
        key = _request(planned)
        if isinstance(self.stacks.get(key), StackError):
            return True
        stack = self.stacks.get(key) or environment.ready(planned.stack)
        if not isinstance(stack, Stack):
            return False
        with contextlib.suppress(LaunchError):  # the trial fails again and reports it
            self._launcher(planned, stack)
        return True

    # -- stacks and launchers ----------------------------------------------------------

    def _launcher(self, planned: PlannedTrial, stack: Stack) -> Launcher:
        key = (stack.key, planned.trial.launcher)
        if key not in self._launchers:
            self._launchers[key] = self._hosts.enter_context(
                self.launcher(planned.trial.launcher, stack, self.folder, self.launch_options)
            )
        return self._launchers[key]

    def _join(self) -> None:
        """On several nodes: waits until each is present with the same plan."""
        options = self.launch_options
        if options.nnodes == 1 or options.shared is None:
            return
        if any(isinstance(planned.trial.task, ResumeTask) for planned in self.plan.trials):
            raise UsageError(
                f"{self.plan.scenario.name} reads a checkpoint that all ranks have saved into one "
                "folder: it runs on one node",
                "Omit --nnodes.",
            )
        plan = [moediag.__version__, self.plan.scenario.identity()]
        plan += [f"{p.trial.name} {p.trial.world_size} {p.stack}" for p in self.plan.trials]
        meeting = Meeting(
            options.shared, options.node_rank or 0, options.nnodes, "\n".join(plan),
            options.silence, stopped=lambda: options.stopped,
        )  # fmt: skip
        self.meeting = self._hosts.enter_context(meeting)
        self.launch_options = dataclasses.replace(options, job=meeting.token)

    def _meet(self, problem: str = "") -> str:
        """Waits until all nodes begin the same trial. Returns why another node cannot run it."""
        return self.meeting.meet(problem) if self.meeting is not None else ""

    def _stack(self, request: Mapping[str, str]) -> Stack | StackError:
        """Builds the stack or takes it from the cache. A failed build fails only its own trials,
        unless no stack can be built or a typed release does not exist."""
        key = tuple(sorted(request.items()))
        if key in self.stacks:
            return self.stacks[key]
        label = ", ".join(f"{k} {v}" for k, v in request.items()) or "transformers, newest release"

        def progress(text: str, fraction: float | None) -> None:
            self._go_on()
            self.observer.stack(label, text, fraction)

        stack: Stack | StackError
        try:
            stack = self.ensure(request, progress)
        except StackError as error:
            wanted = {_request(t) for t in self.plan.trials}
            failed = {k: s for k, s in self.stacks.items() if isinstance(s, StackError)}
            if self._mistyped(error, request):
                raise
            if wanted <= {key, *failed}:
                raise next(iter(failed.values()), error) from None
            stack = error
        self.stacks[key] = stack
        return stack

    def _go_on(self) -> None:
        """Raises KeyboardInterrupt if another thread requested a stop."""
        if self.launch_options.stopped:
            raise KeyboardInterrupt

    def _mistyped(self, error: StackError, request: Mapping[str, str]) -> bool:
        """Whether ``--stack`` names something that does not exist, which the user must correct."""
        typed = any(text.startswith("--stack ") for text in self.plan.overrides)
        return isinstance(error, NoSuchRelease) and typed and request == self.plan.scenario.stack

    # -- one trial ---------------------------------------------------------------------

    def _one(self, planned: PlannedTrial, stack: Stack, start: Launcher) -> TrialResult:
        trial = planned.trial
        self._go_on()
        versions = dict(stack.versions)
        took = None
        if planned.reference_key is not None:
            reference, took = self._reference(planned, stack, start)
            if reference.launch_error:
                self.launch_errors.append(LaunchError(reference.launch_error))
            if reference.verdict is not None:
                self._meet(reference.reason)
                return planned_rows.without_launch(
                    planned, versions, reference.verdict, reference.reason
                )
            trial = dataclasses.replace(trial, reference_path=str(reference.path))
        if elsewhere := self._meet():
            return planned_rows.without_launch(planned, versions, Verdict.INCONCLUSIVE, elsewhere)
        folder = self._fresh(trial.name)
        began = time.monotonic()
        try:
            record = start.run(trial, folder, _telling(self.observer, trial.name))
        except LaunchError as error:
            self.launch_errors.append(error)
            return planned_rows.without_launch(
                planned, versions, Verdict.INCONCLUSIVE, error.message
            )
        if not record.succeeded:
            _require_space(self.folder)
        _await_outcomes(folder, record)
        if record.launch_error and record.first_progress is None:
            self.launch_errors.append(LaunchError(record.launch_error))
        if record.launch_error == BROKEN_OFF:  # what its ranks raised after that proves nothing
            return planned_rows.without_launch(planned, versions, Verdict.INCONCLUSIVE, BROKEN_OFF)
        evidence = read_trial(folder)
        found = diagnose(evidence)
        found = dataclasses.replace(found, notes=(*found.notes, *stack.notes))
        if evidence.nccl:
            versions["nccl"] = evidence.nccl
        seconds = Seconds(
            environment=round(stack.seconds, 3),
            launch=record.until_progress,
            stall_to_verdict=record.since_stall(),
            total=round(time.monotonic() - began, 3),
            reference=took,
        )
        # Fewer samples than the ranks could take; ranks may share one along a model axis.
        repeated = trial.skew.batches in ("identical", "one-token")
        other_batch = repeated and trial.skew.batches != self.plan.scenario.skew.batches
        done = planned_rows.planned_row(planned, found, versions, folder.name)
        return dataclasses.replace(done, seconds=seconds, other_batch=other_batch)

    def _reference(
        self, planned: PlannedTrial, stack: Stack, start: Launcher
    ) -> tuple[Reference, float | None]:
        """Returns the single-process run to compare this trial with, done once per key and stack;
        and its seconds, None if it already existed."""
        name = f"reference-{planned.reference_key}-{stack.key}"
        known = self.references.get(name)
        if known is not None:
            return known, None
        path = self.folder / f"{name}.pt"
        trial = dataclasses.replace(
            planned.trial,
            name=name,
            task=ReferenceTask(),
            fix=None,
            record=False,
            reference_path=str(path),
        )
        folder = self._fresh(name)
        began = time.monotonic()
        record = LaunchRecord(began, began)
        try:
            record = start.run(trial, folder, None)
            _await_outcomes(folder, record)
            reason = Outcome.read(folder / outcome_file(0)).applicable
            found = Reference(path, Verdict.NOT_APPLICABLE if reason else None, reason or "")
        except LaunchError as error:
            found = Reference(path, Verdict.INCONCLUSIVE, error.message, error.message)
        except (OSError, ValueError):
            _require_space(self.folder)
            log = folder / output_file(0)
            found = Reference(
                path,
                Verdict.INCONCLUSIVE,
                f"the single-process reference failed, so nothing can be judged: "
                f"{_why(record, log)} (all of it in {name}/{log.name})",
                record.launch_error,
            )
        self.references.add(name, found)
        return found, round(time.monotonic() - began, 3)

    def _fresh(self, name: str) -> Path:
        """Returns the folder of a trial; an interrupted trial's files are moved aside."""
        folder = self.folder / name
        if folder.exists() and self.launch_options.nnodes == 1:
            kept, number = self.folder / INTERRUPTED, 1
            kept.mkdir(exist_ok=True)
            while (target := kept / f"{name}-{number}").exists():
                number += 1
            folder.rename(target)
        return folder


def _telling(observer: Observer, name: str) -> Callable[[Progress], None]:
    """Reports what the trial ``name`` does, and once that it stopped."""
    doing = ""

    def tell(progress: Progress) -> None:
        nonlocal doing
        if progress.doing == "capturing" and doing != progress.doing:
            stopped = wording.seconds(progress.seconds)
            observer.event(f"{name}: stopped after {stopped}, collecting evidence")
        doing = progress.doing
        observer.doing(name, glance(progress))

    return tell


def _request(planned: PlannedTrial) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(planned.stack.items()))


def _why(record: LaunchRecord, log: Path) -> str:
    """Returns why a process failed: how its launch ended, else the last line of its output."""
    status = record.exits.get(0)
    if record.launch_error:
        return record.launch_error
    if status is not None and status.signal == "SIGKILL" and record.oom_kills:
        return "it was killed for memory (the kernel's OOM killer ran meanwhile)"
    if status is not None and status.signal is not None:
        return f"it was ended by {status.signal}"
    return last_line(log) or "it left no output"


def _await_outcomes(folder: Path, record: LaunchRecord) -> None:
    """Waits a moment for what ranks that ended well have measured: a network file system may show
    a file of another process late."""
    until = time.monotonic() + _LATE
    for rank, status in record.exits.items():
        while status.code == 0 and not (folder / outcome_file(rank)).exists():
            if time.monotonic() > until:
                return
            time.sleep(0.1)


def _require_space(folder: Path) -> None:
    """Raises DiskFull if the disk is full: what a launch that failed left then proves nothing."""
    probe = folder / SPACE_FILE
    try:
        probe.write_bytes(bytes(_SPACE))
    except OSError as error:
        if says_disk_full(error):
            raise DiskFull(f"no space left on device: {folder}") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def last_line(log: Path) -> str:
    """Returns the last non-empty line, or ""."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
