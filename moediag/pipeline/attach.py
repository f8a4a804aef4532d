"""`moediag attach`: looks at a running job that was started without moediag, and diagnoses it.

The same path as a watched job: a folder of evidence, a diagnosis, a result. Only what fills the
folder differs."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from moediag import protocol
from moediag.errors import UsageError
from moediag.evidence.trial_folder import read_trial
from moediag.launch.attach import archives, collecting, found_jobs
from moediag.launch.attach.collecting import AttachOptions
from moediag.launch.attach.found_jobs import Job
from moediag.launch.attach.proc import Proc
from moediag.pipeline.examine import result_of
from moediag.pipeline.run_folder import run_folder
from moediag.pipeline.watch import of_job
from moediag.records import dataclass
from moediag.result import RunResult
from moediag.result.wording import plural, ranks

NO_JOB = (
    "Give the pid of a rank or of its launcher: moediag attach PID. A job of another user can only "
    "be read as that user, or as root; one in a container there, or from its machine."
)


@dataclass(frozen=True, slots=True)
class Attached:
    """A job that was looked at."""

    result: RunResult
    folder: Path
    hosts: tuple[str, ...] = ()
    """The machines that were asked."""


def choose(pid: int | None) -> Job:
    """The job of process ``pid``, or the only one of this user. Raises UsageError with a list if
    there are several, and if there is none."""
    proc = Proc()
    if pid is not None:
        if proc.seen(pid) is None:
            raise UsageError(f"there is no process {pid} here", NO_JOB)
        owner = proc.owner(pid)
        if owner != os.getuid() and not proc.environment(pid):
            raise UsageError(f"process {pid} belongs to another user", NO_JOB)
        found = found_jobs.of_process(proc, pid)
        if not found:
            raise UsageError(f"process {pid} is not a rank of a job and starts none", NO_JOB)
        return _only(found)
    found = found_jobs.of_user(proc, os.getuid())
    if not found:
        raise UsageError("no training job of yours was found on this machine", NO_JOB)
    return _only(found)


def again(job: Job) -> Job:
    """``job`` as long as a rank of it is there, so that ranks which ended are told; else what its
    launcher started again. Raises UsageError if it has ended."""
    proc = Proc()
    for one in job.ranks:
        seen = proc.seen(one.pid)
        if seen is not None and seen.started == one.started and seen.state not in "ZX":
            return job
    if job.launcher in ("", "python"):
        raise UsageError("the job has ended", NO_JOB)
    return choose(job.root)


def _only(found: Sequence[Job]) -> Job:
    if len(found) > 1:
        listed = "\n".join(f"  {line}" for line in map(described, found))
        raise UsageError(
            f"{len(found)} training jobs of yours run here:\n{listed}",
            f"Choose one: moediag attach {found[0].root}",
        )
    return found[0]


def described(job: Job) -> str:
    """``41237  train.py  ranks 0-7 of 16  torchrun``."""
    numbers = [one.rank for one in job.ranks if one.rank is not None]
    who = ranks(numbers) if numbers else plural(len(job.ranks), "rank")
    of_all = f" of {job.world_size}" if job.world_size > len(job.ranks) else ""
    return "  ".join(filter(None, (str(job.root), job.name, f"{who}{of_all}", job.launcher)))


def attach(
    job: Job, options: AttachOptions, out: Path | None, progress: Callable[[str], None]
) -> Attached:
    """Looks at ``job`` and returns what that shows. The evidence is in a run directory: ``out``, or
    a new one, which is removed if the look is interrupted or cannot be written."""
    folder = run_folder(out, f"attach-{job.name}")
    started = datetime.now(timezone.utc)
    try:
        attempt = folder / protocol.attempt_folder(0)
        collected = collecting.collect(job, attempt, options, progress)
        return judged(folder, collected.trial, f"attach {job.root}", started, collected.notes)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_archive(done: Attached, target: Path, redact: bool) -> None:
    """Writes the evidence of ``done`` as one file."""
    archives.pack(done.folder / protocol.attempt_folder(0), target, redact, done.hosts)


def judged(
    folder: Path, trial: protocol.Trial, asked: str, started: datetime,
    notes: Sequence[str] = (), hosts: Sequence[str] = (),
) -> Attached:  # fmt: skip
    """The diagnosis of the evidence in the run directory ``folder``, which gets the result."""
    attempt = folder / protocol.attempt_folder(0)
    result = _result(trial, attempt, asked, started, notes)
    result.write(folder)
    return Attached(result, folder, tuple(hosts))


def _result(
    trial: protocol.Trial, folder: Path, asked: str, started: datetime, notes: Sequence[str]
) -> RunResult:
    evidence = read_trial(folder)
    found = result_of(trial, evidence, folder.name)
    found = found.diagnosed(notes=(*notes, *found.notes))
    result = of_job(trial.scenario, [found], started)
    return dataclasses.replace(result, overrides=(asked,))
