"""Probes one release: builds its environment, runs the scenario's trials and judges them.

Trials run as in every run (:mod:`moediag.lab.campaign.run`); a probe's folder is a run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moediag.errors import (
    ExitCode,
    Interrupted,
    LaunchError,
    MoediagError,
    NoEnvironments,
    StackError,
)
from moediag.hardware import cores
from moediag.lab.campaign import run as runner
from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict, skip
from moediag.lab.campaign.bisect.prober import Probed
from moediag.lab.campaign.bisect.question import Question, Setting
from moediag.lab.campaign.bisect.signature_match import CannotLearn, Match, Target, judge, learn
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_name
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.prebuild import Ahead
from moediag.lab.launch.hosts import Hosts
from moediag.lab.pipeline.trials import TrialOptions
from moediag.lab.scenario.plan import LAUNCHERS
from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack
from moediag.launch.settings import LaunchOptions
from moediag.result import RunResult, TrialResult, Verdict

Building = Callable[[str, "float | None"], None]
PROBES = "probes"  # folder of the probes' run directories, in the bisect's
_LONGEST = 300  # characters of a reason


class TooRare(MoediagError):
    """The failure is too rare to be measured with a reasonable number of trials."""

    exit_code = ExitCode.INCONCLUSIVE


class Releases:
    """The real prober; call :meth:`close` at the end. ``hosts``: given if shared."""

    def __init__(
        self,
        question: Question,
        folder: Path,
        display: Display,
        launch: LaunchOptions,
        hosts: Hosts | None = None,
    ) -> None:
        self.question = question
        self.folder = folder
        self.display = display
        self.stopping = threading.Event()
        self.launch = dataclasses.replace(launch, stop=self.stopping)
        self.ahead = Ahead()
        scenario = question.scenario
        families = {scenario.merged(name).model.family for name in scenario.variants}
        warm = dataclasses.replace(self.launch, families=tuple(sorted(families)))
        self.hosts = hosts or Hosts(folder, warm)
        # Importing takes a core; on two cores the running probe needs the other.
        self._early = 1 if cores() < 4 else 2

    def probe(self, setting: Setting, attempt: int, target: Target | None) -> Probed:
        question, begun = self.question, time.monotonic()
        declared = question.scenario.variants[question.variant].repeats
        trials = target.rate.repeats() if target else max(question.asked.calibrate, declared)
        told: list[Probed] = []
        for request in setting.requests:
            ran = _Ran(setting, attempt, question.variant, begun)
            self._run(ran, request, trials)
            told.append(self._judged(ran, target))
            if told[-1].record.verdict.kind != Kind.SKIP:
                return told[-1]
        if not told:
            record = _Ran(setting, attempt, question.variant, begun).record(skip(setting.problem))
            return Probed(record, None, setting.problem)
        # The first environment is the intended one.
        record = dataclasses.replace(told[0].record, seconds=time.monotonic() - begun)
        return dataclasses.replace(told[0], record=record)

    def prepare(self, settings: Sequence[Setting], hosts: bool = True) -> None:
        for place, setting in enumerate(settings):
            with contextlib.suppress(MoediagError):  # the probe fails again and reports it
                for request in setting.requests[:1]:
                    stack = environment.ready(request)
                    if stack is None:
                        self.ahead.build(setting.name, request)
                    elif hosts and place < self._early and setting.source is None and self._fork:
                        self.hosts.begin(stack)

    def stop(self) -> None:
        self.stopping.set()

    def close(self) -> None:
        self.ahead.close()
        self.hosts.close()
        self.stopping.clear()  # the run it was meant for has ended; later probes may run

    @property
    def _fork(self) -> bool:
        chosen = self.question.asked.launcher
        return (LAUNCHERS[self.question.asked.device] if chosen == "auto" else chosen) == "fork"

    # -- one release -----------------------------------------------------------------------

    def _judged(self, ran: _Ran, target: Target | None) -> Probed:
        question = self.question
        if ran.reason:
            return Probed(ran.record(skip(ran.reason)), None, ran.reason)
        if target is not None:
            return Probed(ran.record(judge(ran.trials, target)), target)
        try:
            target = learn(
                ran.trials,
                question.variant,
                question.declared,
                question.asked.match,
                question.pattern,
            )
        except CannotLearn as error:
            nothing = Target(question.variant, (), (), Match.EXACT)
            verdict = judge(ran.trials, nothing)
            return Probed(ran.record(verdict), None, _problem(error, question, ran))
        try:
            target.rate.repeats()
        except ValueError as error:
            raise TooRare(
                f"{question.variant} on {question.package} {ran.name}: {error}",
                "Make it more frequent (--set), or measure it with more trials (--calibrate).",
            ) from error
        return Probed(ran.record(judge(ran.trials, target)), target)

    def _run(self, ran: _Ran, request: Mapping[str, str], trials: int) -> None:
        source = ran.setting.source
        observer = _Observer(self.display, probe_name(ran.name, ran.attempt), self.stopping)

        def ensure(request: Mapping[str, str], progress: Building) -> Stack:
            stack = environment.ensure(request, progress)
            return overlay(stack, source, ran.name, self.question.package) if source else stack

        try:
            # The search ends with second probes of the releases that it compares.
            noting = ran.attempt > 1 and ran.setting.release is not None
            planned = self.question.plan(request, trials, noting)
            # Checked here as well as in the run: a build must not import during a probe.
            environment.ensure(planned.scenario.stack, observer.building)
            self.ahead.end(ran.name)
            folder = new_folder(self.folder / PROBES, ran.name.replace(" ", "-"))
            ran.evidence = str(folder.relative_to(self.folder))
            options = TrialOptions(self.launch, self.hosts.launcher, ensure)
            asked = runner.header(planned, self.launch)
            with opened(asked, folder, False, ran.name) as journal:
                ran.result = runner.run(planned, journal, options, observer)
        except NoEnvironments:
            raise
        except (StackError, LaunchError) as error:
            ran.reason = _flat(error.message)
            ran.launched = not isinstance(error, LaunchError)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted during the probe of {ran.name}") from None
        finally:
            self.ahead.end(ran.name)


def overlay(stack: Stack, source: Path, name: str, package: str) -> Stack:
    """Returns ``stack`` with ``source`` first on its path. ``name``: identifies the content of
    ``source``; it must be unique, because processes that imported it are found by the stack's
    key."""
    had = stack.versions.get(package)
    return dataclasses.replace(
        stack,
        key=f"{stack.key}-{name.replace(' ', '-')}",
        versions={**stack.versions, package: f"{name}, on {had}" if had else name},
        pythonpath=[source, *stack.pythonpath],
        notes=(*stack.notes, f"{package} is {name}, not what is installed ({had or 'nothing'})"),
    )


class _Ran:
    """What a run left. ``reason``: why it could not run, else ""."""

    def __init__(self, setting: Setting, attempt: int, variant: str, began: float) -> None:
        self.setting = setting
        self.name = setting.name
        self.attempt = attempt
        self.variant = variant
        self.began = began
        self.evidence = ""
        self.reason = ""
        self.launched = True
        self.result: RunResult | None = None

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        return self.result.trials if self.result else ()

    def record(self, verdict: ProbeVerdict) -> ProbeRecord:
        release = self.setting.release
        uploaded = (
            release.uploaded.isoformat(timespec="seconds") if release and release.uploaded else ""
        )
        shown = [t.signature for t in self.trials if t.variant == self.variant]
        judged = all(t.verdict != Verdict.INCONCLUSIVE for t in self.trials)
        return ProbeRecord(
            version=self.name,
            verdict=dataclasses.replace(verdict, text=_flat(verdict.text)),
            attempt=self.attempt,
            uploaded=uploaded,
            signature="; ".join(dict.fromkeys(shown)),
            seconds=time.monotonic() - self.began,
            evidence=self.evidence,
            lasting=verdict.kind != Kind.SKIP or (self.launched and judged),
        )


class _Observer(Display):
    """Passes on a run's progress in one line, and ends the run on a stop request."""

    def __init__(self, display: Display, version: str, stopping: threading.Event) -> None:
        super().__init__()
        self.display = display
        self.version = version
        self.stopping = stopping

    def building(self, text: str, fraction: float | None) -> None:  # noqa: ARG002
        if self.stopping.is_set():
            raise KeyboardInterrupt
        self.display.doing(self.version, text)

    def stack(self, key: str, text: str, fraction: float | None) -> None:  # noqa: ARG002
        self.building(text, fraction)

    def begun(self, name: str) -> None:
        self.display.doing(self.version, f"{name}: launching")

    def doing(self, name: str, text: str) -> None:
        self.display.doing(self.version, f"{name}: {text}")


def new_folder(base: Path, version: str) -> Path:
    """Makes a new folder; what an interrupted probe left is kept."""
    number = 1
    while True:
        folder = base / (version if number == 1 else f"{version}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _problem(error: CannotLearn, question: Question, ran: _Ran) -> str:
    """Describes what showed instead, and companions that differ from the scenario's."""
    had = next((t.stack for t in ran.trials if t.stack), {})
    drifted = {
        name: version
        for name, version in question.pins.items()
        if name in had and had[name] != version and name not in question.asked.hold
    }
    if not drifted:
        return f"{error.message}. {error.help_text}"
    there = ", ".join(f"{name} {had[name]}" for name in drifted)
    named = " ".join(f"--hold {name}={version}" for name, version in drifted.items())
    return f"{error.message}. It ran with {there}; as the scenario has it: {named}"


def _flat(text: str) -> str:
    """Returns one line, so that it fits a table."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 1] + "…"
