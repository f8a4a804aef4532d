"""Runs a night: one job after another until the time is up, each recorded when it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import hardware
from moediag.errors import Interrupted
from moediag.lab.campaign.engine import (
    Clock,
    Display,
    Header,
    Journal,
    Line,
    Records,
    Strategy,
    drive,
    resumable,
)
from moediag.lab.campaign.executors import HERE, Choice, Lost, Maker
from moediag.lab.campaign.executors import opened as executor_opened
from moediag.lab.campaign.nightly import jobs, judged
from moediag.lab.campaign.nightly.jobs import Asked, Planned
from moediag.lab.campaign.nightly.night import Entry, History, Hunted, Job, Night
from moediag.lab.campaign.run import digest
from moediag.lab.campaign.sweep.shared_runs import Ran, Runs
from moediag.lab.scenario.plan import Plan
from moediag.launch.settings import LaunchOptions
from moediag.records import dataclass
from moediag.result import RunResult, devices, read_result, wording

RUNS = "runs"  # folder of the run directories, in the night's folder


def header(planned: Sequence[Planned], asked: Asked, command: Sequence[str]) -> Header:
    """Returns the question of a night."""
    tracks = {track.name: track.version for one in planned for track in one.tracks}
    return Header(
        "nightly",
        {
            "scenarios": list(dict.fromkeys(one.name for one in planned)),
            "tracks": tracks,
            "number of ranks": asked.world_size,
            "device": asked.device,
            "launcher": asked.launcher,
            "timeout": asked.timeout,
            "torch": asked.torch,
        },
        {
            f"the scenario {one.scenario} on {track.name}": digest(one.plan)
            for one in planned
            if one.plan is not None
            for track in one.tracks
        },
        command=tuple(command),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a night."""

    night: Night
    results: dict[str, RunResult]
    """Run directory, relative to the night's folder -> what ran there."""
    done: str
    """What is finished, in words."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The result of one launch."""

    jobs: tuple[Job, ...]
    entries: tuple[Entry, ...] = ()

    @property
    def finished(self) -> bool:
        return all(job.finished for job in self.jobs)


def run(
    planned: Sequence[Planned],
    asked: Asked,
    notes: Sequence[str],
    history: History,
    journal: Journal,
    minutes: float,
    display: Display,
    launch: LaunchOptions | None = None,
    hunt: Callable[[], Hunted | None] = lambda: None,
    executor: Choice = HERE,
) -> Result:
    """Runs what fits into ``minutes``, then ``hunt``, and saves the night in ``history`` after each
    job. A resumed night runs what did not fit or was not finished.

    Raises Interrupted after Ctrl-C; finished jobs are kept."""
    options = launch or LaunchOptions()
    with (
        executor_opened(executor, journal.folder, display.say) as remote,
        Clock(minutes * 60, remote.stop if remote else None) as clock,
    ):
        display.bound = lambda: clock.left
        if remote is None:  # an event cannot be sent
            options = dataclasses.replace(options, stop=clock.stop)
        make = functools.partial(Runs, journal.folder.resolve(), options)
        with contextlib.closing(Maker(make, remote, display.doing)) as runs:
            tonight = _Tonight(planned, asked, notes, history, journal, runs, display, clock)
            drive(tonight, journal, display, executor.at_once(1))
    display.bound = None
    with resumable(journal, tonight.done):
        tonight.hunted = hunt()
    return Result(tonight.night(complete=True), tonight.results(), tonight.done())


class _Tonight(Strategy[str, _Done]):
    """An item is the folder of a launch."""

    counted = False

    def __init__(
        self, planned: Sequence[Planned], asked: Asked, notes: Sequence[str], history: History,
        journal: Journal, runs: Maker[Runs], display: Display, clock: Clock,
    ) -> None:  # fmt: skip
        self.asked = asked
        self.notes = notes
        self.history = history
        self.folder = journal.folder
        self.runs = runs
        self.display = display
        self.clock = clock
        self.started, self.path = _night_of(journal, history, asked.lane)
        history.nights = [night for night in history.nights if night.started != self.started]
        self.earlier = [night for night in history.nights if night.lane == asked.lane]
        self.planned = {one.folder: one for one in jobs.ordered(planned, self.earlier)}
        self.records = Records.of(journal, "job", _Done)
        self.done_jobs = {n: self.records[n] for n in self.planned if n in self.records}
        self.hunted: Hunted | None = None
        spent = sum(done.jobs[0].seconds for done in self.done_jobs.values())
        self.before = spent - time.monotonic()
        display.series("job", [len(one.plan.trials) for one in self.planned.values() if one.plan])
        for name, done in self.done_jobs.items():
            plan = self.planned[name].plan
            display.skip(len(plan.trials) if plan else 0, done.jobs[0].seconds)

    def wanted(self, most: int) -> Sequence[str]:
        return [name for name in self.planned if name not in self.done_jobs][:most]

    def name(self, item: str) -> str:
        return item

    def make(self, item: str) -> _Done:
        one = self.planned[item]
        if one.plan is None:
            return _Done(one.jobs(False, problem=one.problem))
        needed = jobs.seconds(one, self.earlier)
        tried = (job for done in self.done_jobs.values() for job in done.jobs)
        first = not any(job.finished or job.seconds for job in tried)
        # A job that never fits would never run, so the first one of a night always starts.
        if self.clock.up or (needed > self.clock.left and not first):
            took = f"it took {needed:.0f} s before" if needed else "no time was left"
            return _Done(one.jobs(False, problem=f"did not fit: {took}"))
        begun = time.monotonic()
        where = f"{RUNS}/{one.folder}"
        try:
            ran = self._ran(one.plan, self.folder.resolve() / where)
        except Interrupted:
            if not self.clock.up:
                raise
            spent = round(time.monotonic() - begun, 1)
            return _Done(one.jobs(False, spent, f"did not fit: ended after {spent:.0f} s"))
        done = one.jobs(ran.result is not None, ran.seconds, ran.problem)
        found = _entries(one, one.plan, ran.result, where) if ran.result else ()
        return _Done(done, tuple(found))

    def _ran(self, plan: Plan, below: Path) -> Ran:
        def needs() -> Iterator[Mapping[str, str]]:
            yield from {tuple(sorted(p.stack.items())): p.stack for p in plan.trials}.values()

        name = f"{below.parent.name} {below.name}"
        ran: Ran = self.runs.call(name, "run", plan, below, self.display, needs=needs)
        return ran

    def not_run(self, item: str, why: Lost) -> _Done:
        return _Done(self.planned[item].jobs(False, problem=str(why)))

    def keeps(self, value: _Done) -> bool:
        """Whether it is final: what did not fit, or gave no result, is tried again."""
        return value.finished

    def taken(self, item: str, value: _Done) -> None:
        self.done_jobs[item] = value

    def stop(self) -> None:
        self.runs.stop()

    def line(self, value: _Done) -> Line:
        return Line(value.jobs[0].scenario)

    def done(self) -> str:
        finished = sum(done.finished for done in self.done_jobs.values())
        return f"{finished} of {wording.plural(len(self.planned), 'job')}"

    def write(self, incomplete: str) -> None:  # noqa: ARG002 - its jobs show what is missing
        self.history.keep(self.path, self.night(complete=False))

    def night(self, complete: bool) -> Night:
        """Returns tonight as far as it is known; saves it if it is complete."""
        done = [self.done_jobs[name] for name in self.planned if name in self.done_jobs]
        night = Night(
            started=self.started,
            lane=self.asked.lane,
            moediag_version=moediag.__version__,
            machine=hardware.machine(),
            entries=tuple(entry for one in done for entry in one.entries),
            jobs=tuple(job for one in done for job in one.jobs),
            notes=tuple(self.notes),
            seconds=round(self.before + time.monotonic(), 1),
            complete=complete,
            hunt=self.hunted,
        )
        if complete:
            self.history.keep(self.path, night)
        return night

    def results(self) -> dict[str, RunResult]:
        found = (f"{RUNS}/{name}" for name, done in self.done_jobs.items() if done.entries)
        return {where: read_result(self.folder / where) for where in found}


def _night_of(journal: Journal, history: History, lane: str) -> tuple[str, Path]:
    """Returns (start of the night, its file in the history), or those of a resumed night."""
    nights = Records(journal, "night", dict, dict)
    if "tonight" not in nights:
        started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        path = history.begin(started, lane).resolve()
        nights.add("tonight", {"started": started, "path": str(path)})
    tonight = nights["tonight"]
    return str(tonight["started"]), Path(str(tonight["path"]))


def _entries(one: Planned, plan: Plan, result: RunResult, where: str) -> Iterator[Entry]:
    variants = plan.scenario.variants
    for track in one.tracks:
        for entry in judged.entries(result, track, where):
            # If the release is the pinned one, every variant ran, also those it does not move.
            if track.package not in variants[entry.variant].stack:
                yield dataclasses.replace(entry, command=_command(one, plan, entry.variant))


def _command(one: Planned, plan: Plan, variant: str) -> str:
    trial = plan.trials[0].trial
    device = devices.SHARED if trial.shared_gpu else "gpu" if trial.backend == "nccl" else "cpu"
    words = ["moediag", "run", one.name, "--variant", variant]
    words += devices.options(device, trial.world_size)
    for package, version in one.moved.items():
        words += ["--stack", f"{package}={version}"]
    return shlex.join(words)
