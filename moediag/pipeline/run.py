"""The one way through the house: plan -> stacks -> launch -> evidence -> diagnosis -> result.

Nothing here knows a particular failure. Trials run one after the other, grouped by stack so that
each stack's host imports once; the hosts of later stacks warm up while earlier trials run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moediag
from moediag import doctor
from moediag.diagnosis.diagnose import diagnose
from moediag.errors import (
    Interrupted,
    LaunchError,
    NodeLost,
    NoSuchRelease,
    StackError,
    UsageError,
)
from moediag.evidence.trial_folder import read_trial
from moediag.judgement import conclusion as judge
from moediag.judgement import step_time, training_table
from moediag.judgement.regressions import with_regressions
from moediag.judgement.side_by_side import together
from moediag.launch import signals
from moediag.launch.follow.several_nodes import BROKEN_OFF
from moediag.launch.launcher import Launcher, launcher
from moediag.launch.nodes.rendezvous import Meeting
from moediag.launch.settings import LaunchOptions
from moediag.pipeline import rows
from moediag.protocol import CostTask, Outcome, ReferenceTask, ResumeTask, outcome_file, output_file
from moediag.report.progress import Observer
from moediag.result import RunResult, Seconds, TrialResult, Verdict
from moediag.scenario.plan import Plan, PlannedTrial
from moediag.stacks import environment
from moediag.stacks.environment import Stack

SCENARIO_FILE = "scenario.yaml"


# (kind, stack, run directory, options): to be used as a context manager
GiveLauncher = Callable[
    [str, Stack, Path, LaunchOptions], contextlib.AbstractContextManager[Launcher]
]


GiveStack = Callable[[Mapping[str, str], Callable[[str, float | None], None]], Stack]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``out``: the run directory, which must not exist or be empty; default: a new one below
    ``moediag-runs``. ``launcher``: gives launchers that may outlive the run; default: its own.
    ``ensure``: gives environments; default: stacks.environment."""

    out: Path | None = None
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    launcher: GiveLauncher | None = None
    ensure: GiveStack | None = None


def run(plan: Plan, options: RunOptions, observer: Observer) -> RunResult:
    """Runs every trial of ``plan`` and writes ``result.json``.

    Raises MoediagError when nothing could be run at all, Interrupted after Ctrl-C (with what was
    gathered until then in ``result.json``).
    """
    folder = run_folder(options.out, plan.scenario.name)
    return _Run(plan, options, observer, folder).run()


def run_folder(out: Path | None, name: str) -> Path:
    """Makes the run directory: ``out``, or a new one below ``moediag-runs`` named after the time
    and the scenario. Raises UsageError when it exists and is not empty."""
    try:
        out = _new_folder(name) if out is None else out
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        if isinstance(error, FileExistsError | NotADirectoryError):
            problem = "is a file, or below one"
        else:
            problem = f"cannot be used: {error.strerror or error}"
        raise UsageError(
            f"--out {out or 'moediag-runs'}: {problem}", "Give a folder that can be made."
        ) from error
    if taken:
        raise UsageError(
            f"--out {out}: the folder is not empty",
            "Evidence is never overwritten: give a new folder, or leave --out away.",
        )
    return out.resolve()


def _new_folder(name: str) -> Path:
    """Made by whoever gets it: nodes that share a disk start in the same second. Raises OSError."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = Path("moediag-runs")
    base.mkdir(exist_ok=True)
    number = 1
    while True:
        out = base / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{name}-{number}")
        try:
            out.mkdir()
        except FileExistsError:
            number += 1
        else:
            return out


@dataclass(frozen=True, slots=True)
class _Reference:
    """``verdict``: None, or the verdict of every trial that needs this reference, with why."""

    path: Path
    verdict: Verdict | None = None
    reason: str = ""


class _Run:
    """One run's state: what is built, what is finished."""

    def __init__(self, plan: Plan, options: RunOptions, observer: Observer, folder: Path) -> None:
        self.plan = plan
        self.observer = observer
        self.folder = folder
        families = {t.trial.model.family for t in plan.trials}
        self.launcher = options.launcher or launcher
        self.ensure = options.ensure or environment.ensure
        self.launch_options = dataclasses.replace(options.launch, families=tuple(sorted(families)))
        self.started = datetime.now(timezone.utc)
        self.results: list[TrialResult] = []
        self.stacks: dict[tuple[tuple[str, str], ...], Stack | StackError] = {}
        self.references: dict[tuple[str, str], _Reference] = {}
        self.launch_errors: list[LaunchError] = []
        self.meeting: Meeting | None = None

    def run(self) -> RunResult:
        (self.folder / SCENARIO_FILE).write_text(self.plan.scenario.to_yaml(), encoding="utf-8")
        self.observer.plan(self.plan)
        try:
            self._trials()
        except (KeyboardInterrupt, Interrupted) as error:
            done = f"interrupted after {len(self.results)} of {len(self.plan.trials)} trials"
            with signals.held():
                self._finish(done)
            raise Interrupted(
                f"{done}; evidence is in {self.folder}",
                "Nothing is left running. The same command starts again; "
                "environments that were built are kept.",
            ) from error
        except BaseException as error:
            self._finish(f"ended by an error: {error}")  # nothing gathered is lost
            raise
        result = self._finish()
        if self.launch_errors and len(self.launch_errors) >= len(self.results):
            raise self.launch_errors[0]  # nothing ran at all: that is the answer
        self.observer.finished(result)
        return result

    def _finish(self, incomplete: str = "") -> RunResult:
        trials = step_time.with_ratios(self.plan, self.results, self.folder)
        trials = with_regressions(self.plan, trials)
        trials, tables = together(trials)
        conclusion = judge.conclusion(trials)
        if incomplete:  # a fix that was not tried may be cheaper
            conclusion = dataclasses.replace(conclusion, cheapest_correct_fix=None)
        result = RunResult(
            scenario=self.plan.scenario.name,
            started=self.started.isoformat(timespec="seconds"),
            moediag_version=moediag.__version__,
            machine=doctor.machine(),
            trials=trials,
            conclusion=conclusion,
            overrides=tuple(self.plan.overrides),
            incomplete=incomplete,
            tables=(*training_table.tables(self.plan, trials, self.folder), *tables),
        )
        result.write(self.folder)
        return result

    # -- stacks and launchers ----------------------------------------------------------

    def _trials(self) -> None:
        groups = self._by_stack()
        with contextlib.ExitStack() as hosts:
            self._join(hosts)
            launchers: dict[tuple[str, str], Launcher] = {}
            for request, trials in groups:
                stack = self._stack(dict(request))
                if isinstance(stack, StackError):
                    continue
                for planned in trials:
                    key = (stack.key, planned.trial.launcher)
                    if key not in launchers:
                        launchers[key] = hosts.enter_context(
                            self.launcher(
                                planned.trial.launcher, stack, self.folder, self.launch_options
                            )
                        )
            for request, trials in groups:
                stack = self.stacks[request]
                for planned in trials:
                    if isinstance(stack, StackError):
                        self._meet(stack.message)
                        self._add(rows.not_built(planned, stack))
                    else:
                        key = (stack.key, planned.trial.launcher)
                        self._one(planned, stack, launchers[key])
            with contextlib.suppress(NodeLost):  # everything is done
                self._meet()

    def _join(self, hosts: contextlib.ExitStack) -> None:
        """On several nodes: waits until each is there, with the same plan."""
        options = self.launch_options
        if options.nnodes == 1 or options.shared is None:
            return
        if any(isinstance(planned.trial.task, ResumeTask) for planned in self.plan.trials):
            raise UsageError(
                f"{self.plan.scenario.name} reads a checkpoint that all ranks have saved into one "
                "folder: it runs on one node",
                "Leave --nnodes away.",
            )
        plan = [moediag.__version__, self.plan.scenario.to_yaml()]
        plan += [f"{p.trial.name} {p.trial.world_size} {p.stack}" for p in self.plan.trials]
        meeting = Meeting(
            options.shared, options.node_rank or 0, options.nnodes, "\n".join(plan),
            options.silence, stopped=lambda: options.stopped,
        )  # fmt: skip
        self.meeting = hosts.enter_context(meeting)
        self.launch_options = dataclasses.replace(options, job=meeting.token)

    def _meet(self, problem: str = "") -> str:
        """Trials keep step over the nodes. Returns what keeps another from the next one."""
        return self.meeting.meet(problem) if self.meeting is not None else ""

    def _by_stack(self) -> Iterator[tuple[tuple[tuple[str, str], ...], list[PlannedTrial]]] | Any:
        """Trials grouped by requested stack, in the plan's order; the costs come last, when the
        other hosts have finished importing."""
        groups: dict[tuple[tuple[str, str], ...], list[PlannedTrial]] = {}
        late: dict[tuple[tuple[str, str], ...], list[PlannedTrial]] = {}
        for planned in self.plan.trials:
            request = tuple(sorted(planned.stack.items()))
            target = late if isinstance(planned.trial.task, CostTask) else groups
            target.setdefault(request, []).append(planned)
        return [*groups.items(), *late.items()]

    def _stack(self, request: Mapping[str, str]) -> Stack | StackError:
        """Built or from the cache. One that cannot be built fails its own trials only, unless
        none can be, or what was typed names no release."""
        key = tuple(sorted(request.items()))
        if key in self.stacks:
            return self.stacks[key]
        label = ", ".join(f"{k} {v}" for k, v in request.items()) or "transformers, newest release"

        def progress(text: str, fraction: float | None) -> None:
            self.observer.stack(label, text, fraction)

        stack: Stack | StackError
        try:
            stack = self.ensure(request, progress)
        except StackError as error:
            wanted = {tuple(sorted(t.stack.items())) for t in self.plan.trials}
            failed = {k: s for k, s in self.stacks.items() if isinstance(s, StackError)}
            if self._mistyped(error, request):
                raise
            if wanted <= {key, *failed}:
                raise next(iter(failed.values()), error) from None
            stack = error
        self.stacks[key] = stack
        return stack

    def _mistyped(self, error: StackError, request: Mapping[str, str]) -> bool:
        """Whether ``--stack`` asked for what does not exist: a question to correct, no result."""
        typed = any(text.startswith("--stack ") for text in self.plan.overrides)
        return isinstance(error, NoSuchRelease) and typed and request == self.plan.scenario.stack

    # -- one trial ---------------------------------------------------------------------

    def _one(self, planned: PlannedTrial, stack: Stack, start: Launcher) -> None:
        began = time.monotonic()
        trial = planned.trial
        self.observer.trial_started(trial.name)
        versions = dict(stack.versions)
        if planned.reference_key is not None:
            reference = self._reference(planned, stack, start)
            if reference.verdict is not None:
                self._meet(reference.reason)
                self._add(
                    rows.without_launch(planned, versions, reference.verdict, reference.reason)
                )
                return
            trial = dataclasses.replace(trial, reference_path=str(reference.path))
        if elsewhere := self._meet():
            self._add(rows.without_launch(planned, versions, Verdict.INCONCLUSIVE, elsewhere))
            return
        folder = self.folder / trial.name
        try:
            record = start.run(
                trial, folder, lambda p: self.observer.trial_progress(planned.trial.name, p)
            )
        except LaunchError as error:
            self.launch_errors.append(error)
            self._add(rows.without_launch(planned, versions, Verdict.INCONCLUSIVE, error.message))
            return
        if record.launch_error == BROKEN_OFF:  # what its ranks raised then shows nothing
            self._add(rows.without_launch(planned, versions, Verdict.INCONCLUSIVE, BROKEN_OFF))
            return
        evidence = read_trial(folder)
        found = diagnose(evidence)
        found = dataclasses.replace(found, notes=(*found.notes, *stack.notes))
        if evidence.nccl:
            versions["nccl"] = evidence.nccl
        seconds = Seconds(
            environment=round(stack.seconds, 3),
            launch=_since(record.started, record.first_progress),
            stall_to_verdict=record.since_stall(),
            total=round(time.monotonic() - began, 3),
        )
        # Fewer samples than the ranks could take; who shares one over a model axis is no matter.
        repeated = trial.skew.batches in ("identical", "one-token")
        other_batch = repeated and trial.skew.batches != self.plan.scenario.skew.batches
        done = rows.planned_row(planned, found, versions, folder.name)
        self._add(dataclasses.replace(done, seconds=seconds, other_batch=other_batch))

    def _reference(self, planned: PlannedTrial, stack: Stack, start: Launcher) -> _Reference:
        """The single-process run that this trial is held against, done once per key and stack."""
        key = (stack.key, str(planned.reference_key))
        if key in self.references:
            return self.references[key]
        name = f"reference-{planned.reference_key}-{stack.key}"
        path = self.folder / f"{name}.pt"
        trial = dataclasses.replace(
            planned.trial,
            name=name,
            task=ReferenceTask(),
            fix=None,
            record=False,
            reference_path=str(path),
        )
        folder = self.folder / name
        try:
            start.run(trial, folder, None)
            reason = Outcome.read(folder / outcome_file(0)).applicable
            found = _Reference(path, Verdict.NOT_APPLICABLE if reason else None, reason or "")
        except LaunchError as error:
            self.launch_errors.append(error)
            found = _Reference(path, Verdict.INCONCLUSIVE, error.message)
        except (OSError, ValueError):
            log = folder / output_file(0)
            found = _Reference(
                path,
                Verdict.INCONCLUSIVE,
                f"the single-process reference failed, so nothing can be judged: "
                f"{last_line(log) or 'it left no output'} (all of it in {name}/{log.name})",
            )
        self.references[key] = found
        return found

    def _add(self, result: TrialResult) -> None:
        self.results.append(result)
        self.observer.trial_finished(result)


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 3)


def last_line(log: Path) -> str:
    """The last line that says something; "" without any."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
