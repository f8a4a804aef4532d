"""The night itself: jobs one after the other until the time is up, each kept once it is done."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import doctor
from moediag.campaign.engine import Clock, Display
from moediag.campaign.nightly import jobs, judged
from moediag.campaign.nightly.history import History
from moediag.campaign.nightly.jobs import Asked, Planned
from moediag.campaign.nightly.night import Entry, Job, Night
from moediag.campaign.sweep import session
from moediag.errors import ExitCode, Interrupted
from moediag.launch import signals
from moediag.launch.hosts import Hosts
from moediag.launch.settings import LaunchOptions
from moediag.result import RunResult
from moediag.scenario import devices
from moediag.scenario.plan import Plan

RUNS = "runs"  # folder of the run directories, in the night's


@dataclass(frozen=True, slots=True)
class Result:
    """``results``: run directory, relative -> what ran there."""

    night: Night
    results: dict[str, RunResult]


@dataclass(slots=True)
class _Tonight:
    entries: list[Entry] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    results: dict[str, RunResult] = field(default_factory=dict)


def run(
    planned: Sequence[Planned],
    asked: Asked,
    notes: Sequence[str],
    history: History,
    folder: Path,
    minutes: float,
    observer: Display,
    launch: LaunchOptions | None = None,
) -> Result:
    """Runs what fits into ``minutes`` and keeps the night in ``history``, after each job anew.

    Raises Interrupted after Ctrl-C, with what was finished until then kept."""
    started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    begun = time.monotonic()
    path = history.begin(started, asked.lane)
    earlier = [night for night in history.nights if night.lane == asked.lane]
    tonight = _Tonight()

    def kept(complete: bool) -> Night:
        night = Night(
            started=started,
            lane=asked.lane,
            moediag_version=moediag.__version__,
            machine=doctor.machine(),
            entries=tuple(tonight.entries),
            jobs=tuple(tonight.jobs),
            notes=tuple(notes),
            seconds=round(time.monotonic() - begun, 1),
            complete=complete,
        )
        history.keep(path, night)
        return night

    ordered = jobs.ordered(planned, earlier)
    observer.series("job", [len(p.plan.trials) for p in ordered if p.plan])
    try:
        with Clock(minutes * 60) as clock:
            options = dataclasses.replace(launch or LaunchOptions(), stop=clock.stop)
            hosts = Hosts(folder / session.HOSTS_FOLDER, options)
            try:
                for one in ordered:
                    _job(one, tonight, earlier, folder, options, hosts, observer, clock)
                    kept(complete=False)
            finally:
                hosts.close()
    except (KeyboardInterrupt, Interrupted) as error:
        with signals.held():
            kept(complete=False)
        raise Interrupted(
            f"interrupted after {_done(tonight)} of {len(ordered)} jobs; evidence is in {folder}",
            f"What was finished is kept in {path}; the next night begins with the others.",
        ) from error
    return Result(kept(complete=True), tonight.results)


def _done(tonight: _Tonight) -> int:
    return sum(job.finished for job in tonight.jobs)


def _job(
    one: Planned, tonight: _Tonight, earlier: Sequence[Night], folder: Path,
    options: LaunchOptions, hosts: Hosts, observer: Display, clock: Clock,
) -> None:  # fmt: skip
    if one.plan is None:
        tonight.jobs += one.jobs(False, problem=one.problem)
        return
    needed = jobs.seconds(one, earlier)
    first = not any(job.finished or job.seconds for job in tonight.jobs)
    # What never fits would never run: the first one of a night may try.
    if clock.up or (needed > clock.left and not first):
        took = f"it took {needed:.0f} s before" if needed else "no time was left"
        tonight.jobs += one.jobs(False, problem=f"did not fit: {took}")
        return
    begun = time.monotonic()
    try:
        ran = session.run_one(one.plan, folder / RUNS / one.folder, options, hosts, observer)
    except Interrupted:
        if not clock.up:
            raise
        spent = round(time.monotonic() - begun, 1)
        tonight.jobs += one.jobs(False, spent, f"did not fit: ended after {spent:.0f} s")
        return
    problem = ran.problem or (ran.result.incomplete if ran.result else "")
    tonight.jobs += one.jobs(ran.result is not None, ran.seconds, problem)
    if ran.result is not None:
        where = f"{RUNS}/{one.folder}"
        tonight.results[where] = ran.result
        tonight.entries += _entries(one, one.plan, ran.result, where)


def _entries(one: Planned, plan: Plan, result: RunResult, where: str) -> Iterator[Entry]:
    variants = plan.scenario.variants
    for track in one.tracks:
        for entry in judged.entries(result, track, where):
            # Where the release is the pinned one, every variant ran: also those it does not move.
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


def exit_code(night: Night, new: int) -> int:
    """1: something fails that did not; 4: nothing could run here, 3: nothing could be judged."""
    if new:
        return ExitCode.FAILURE_FOUND
    if not any(job.finished for job in night.jobs):
        tried = any(job.seconds for job in night.jobs)
        return ExitCode.INCONCLUSIVE if tried else ExitCode.CANNOT_RUN_HERE
    judged_any = any(entry.state != "unknown" for entry in night.entries)
    return ExitCode.OK if judged_any else ExitCode.INCONCLUSIVE
