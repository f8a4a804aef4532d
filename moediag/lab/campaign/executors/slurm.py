"""Slurm: a job is a worker (see :mod:`~.pilot`) that performs items until none is left."""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import moediag
from moediag.errors import MachineError
from moediag.lab.campaign.executors import pilot, squeue
from moediag.lab.campaign.executors.executor import (
    Avoided,
    Call,
    Executor,
    Job,
    Lost,
    Reply,
    TooLong,
)
from moediag.lab.campaign.executors.squeue import Queue, Queued, Run

KEYS = (
    "partition", "account", "qos", "time", "mem", "cpus_per_task", "gpus_per_node", "constraint",
    "nodelist", "exclude", "exclusive",
)  # fmt: skip
PROGRAMS = ("sbatch", "squeue", "scancel")
NEEDS = "Run it on a machine with Slurm's commands (sbatch, squeue, scancel)."
FOLDER = "slurm"  # calls, replies and logs, in the campaign's folder
PATIENCE = 30.0  # seconds that a file may take to show in a shared folder
SILENCE = 30.0  # seconds in the queue before the reason is printed
UNLISTED = 3  # jobs that squeue may miss before nothing more is submitted
GLANCE = 0.3  # seconds between two looks into the folder
_LATER = (  # what sbatch says of a request that it may accept later
    "temporarily unable", "try again", "submit limit", "timed out", "unable to contact",
    "unexpected message", "connection refused",
)  # fmt: skip
_ID = re.compile(r"^(\d+)(?:;.*)?\s*$", re.MULTILINE)  # an sbatch of the site may print more lines


class Slurm(Executor):
    """Starts as many workers as there are items at once. Its jobs have one name, by which those of
    a command that was killed are found again."""

    def __init__(
        self, arguments: Mapping[str, str], folder: Path, limit: float, say: Callable[[str], None],
        run: Run = squeue.run, pace: float = squeue.PACE,
    ) -> None:  # fmt: skip
        """``limit``: seconds, the default of ``time=``, which is in minutes. Raises MachineError if
        Slurm does not answer."""
        _answers(run)
        self.folder = folder.resolve() / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options = {"time": str(math.ceil(limit / 60)), **arguments}
        self.name = job_name(folder)
        self.queue = Queue(self.name, run, pace)
        self.avoided = Avoided(say)
        self.open: dict[str, SlurmJob] = {}
        self._say = say
        self._run = run
        self._lock = threading.RLock()
        self._names: frozenset[str] = frozenset()
        self._glanced = float("-inf")
        self._told = ""
        self._started: set[str] = set()
        self._cancelled: set[str] = set()
        self._waits: dict[str, float] = {}  # job -> when it was first seen in the queue
        for path in self.folder.glob(f"*{pilot.CALL}"):  # of a command that was killed
            path.unlink(missing_ok=True)
        self._cancel(job.id for job in self.queue.jobs().values() if job.waiting)

    def submit(self, name: str, call: Call) -> Job:
        key = key_of(name)
        job = SlurmJob(self, key, call)
        with self._lock:
            self.open[key] = job
            names = self.names(again=True)
            if not job.answered(names) and holder(key, names) is None:
                job.put()
            try:
                self.provide()
            except MachineError:
                job.cancel()
                raise
        return job

    def avoid(self, node: str, why: str) -> None:
        with self._lock:
            self.avoided.add(node, why)
            if not node:
                raise self.avoided.none_left()

    def names(self, again: bool = False) -> frozenset[str]:
        """Returns the names of the files in the folder."""
        with self._lock:
            if again or time.monotonic() - self._glanced >= GLANCE:
                self._names = frozenset(path.name for path in self.folder.iterdir())
                self._glanced = time.monotonic()
            return self._names

    def provide(self) -> None:
        """Starts the workers that are missing; tells why they wait. Raises MachineError if none can
        run."""
        with self._lock:
            jobs = self._jobs()
            for job in jobs:
                if job.id in self._started:
                    self._check(job)
            alive = sum(job.alive for job in jobs)
            if len(unlisted := sorted(self.queue.unlisted)) >= UNLISTED:
                raise MachineError(
                    f"squeue lists none of the jobs {', '.join(unlisted)}, which sbatch accepted",
                    f"Type `squeue --name={self.name}` to check it.",
                )
            for _ in range(len(self.open) - alive):
                if not self._start():
                    break
            self._tell([job for job in jobs if job.waiting])

    def cancel(self, job: str) -> None:
        self._cancel([job])

    def close(self) -> None:
        if self._started or self._jobs():
            _cancel_all(self._run, self.name)
        self.avoided.close()

    # -- workers

    def _jobs(self) -> list[Queued]:
        return [job for job in self.queue.jobs().values() if job.id not in self._cancelled]

    def _start(self) -> bool:
        """Returns whether Slurm accepted one more."""
        try:
            done = self._run("sbatch", "--parsable", said=self._script())
        except (OSError, subprocess.TimeoutExpired) as error:
            done = subprocess.CompletedProcess((), 1, "", f"sbatch timed out: {error}")
        if done.returncode == 0:
            job = next(reversed(_ID.findall(done.stdout)), "")
            self._started.add(job)
            if not job:
                raise MachineError(
                    f"sbatch printed no job id: {_last(done.stdout)}",
                    "A plain `sbatch --parsable` must be the first one in PATH.",
                )
            self.queue.submitted(job)
            return True
        said = _last(done.stderr)
        if any(words in said.lower() for words in _LATER):
            self._once(f"sbatch does not accept more jobs now ({said}); trying again")
            return False
        if self.avoided.reasons:
            raise self.avoided.none_left()
        raise MachineError(
            f"sbatch does not accept the job: {said}",
            "Slurm's options are given with --executor-arg: partition=, account=, time=, ….",
        )

    def _script(self) -> str:
        """Returns the script of a worker. It asks for no signal before the end: a signal reaches
        the ranks, too."""
        minutes = self.options["time"]
        seconds = str(60 * int(minutes)) if minutes.isdigit() else "inf"
        excluded = filter(None, (self.options.get("exclude", ""), *self.avoided.reasons))
        options = {
            **self.options, "exclude": ",".join(excluded), "job-name": self.name,
            "output": str(self.folder / "%j.log"), "no-requeue": "true",
        }  # fmt: skip
        lines = [
            f"#SBATCH --{key.replace('_', '-')}" + ("" if value == "true" else f"={value}")
            for key, value in options.items() if value
        ]  # fmt: skip
        words = [sys.executable, "-m", pilot.__name__, str(self.folder), seconds]
        return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(words)}", ""])

    def _check(self, job: Queued) -> None:
        """Avoids the node of a worker that could not start."""
        if job.never:
            raise MachineError(
                f"Slurm will not start job {job.id}: {job.reason}",
                "Ask for less, or for another partition: --executor-arg time=, partition=, ….",
            )
        if job.state != "FAILED" or f"{job.id}{pilot.UP}" in self.names():
            return
        if job.node in self.avoided.reasons:
            return
        log = self.folder / f"{job.id}.log"
        try:
            said = f"its log {log.name} ends: {_last(log.read_text('utf-8', 'replace'))}"
        except OSError:
            said = f"it left no log in {log.parent}"
        self.avoid(job.node, f"the worker on {job.node or 'an unknown node'} did not start, {said}")

    def _tell(self, waiting: list[Queued]) -> None:
        now = time.monotonic()
        self._waits = {job.id: self._waits.get(job.id, now) for job in waiting}
        long = [job for job in waiting if now - self._waits[job.id] >= SILENCE]
        if long:
            reasons = ", ".join(sorted({job.reason for job in long}))
            self._once(f"waiting in the queue of Slurm: {reasons}")

    def _once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text)

    def _cancel(self, jobs: Iterable[str]) -> None:
        wanted = list(jobs)
        self._cancelled.update(wanted)
        if wanted:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._run("scancel", *wanted)


class SlurmJob(Job):
    """An item, and where its files are."""

    def __init__(self, executor: Slurm, key: str, call: Call) -> None:
        self.key = key
        self._executor = executor
        self._call = call
        self._ended: float | None = None
        self._started = 0.0

    def put(self, suffix: str = pilot.CALL) -> None:
        """Writes the call, whole or not at all."""
        folder = self._executor.folder
        unfinished = folder / f"{self.key}.unfinished"
        unfinished.write_bytes(pickle.dumps(self._call.arguments))
        unfinished.rename(folder / f"{self.key}{suffix}")

    def answered(self, names: frozenset[str]) -> bool:
        return f"{self.key}{pilot.REPLY}" in names

    def reply(self) -> Reply | None:
        executor = self._executor
        names = executor.names()
        if self.answered(names):
            return self._read()
        held = holder(self.key, names)
        if held is None:
            executor.provide()
            return None
        worker, number = held
        if not self.running:
            self.running, self._started = True, time.monotonic()
        job = executor.queue.jobs().get(worker)
        if job is not None and job.alive:
            self._ended = None
            return None
        self._lost(worker, number, job)
        return None

    def _lost(self, worker: str, number: int, job: Queued | None) -> None:
        """Waits for a reply on its way; then raises Lost, or lets another worker start anew if this
        one had spent its time on other items."""
        executor, now = self._executor, time.monotonic()
        state = job.state if job is not None else ""
        self._ended = self._ended or now
        if state in ("", "COMPLETED") and now - self._ended < PATIENCE:
            return
        if self.answered(executor.names(again=True)):
            return
        (executor.folder / f"{self.key}.{worker}.{number}{pilot.TAKEN}").unlink(missing_ok=True)
        if state == "TIMEOUT" and number > 1:
            self.running, self._ended = False, None
            self.put(pilot.ALONE)
            return
        if state == "TIMEOUT":
            minutes = executor.options["time"]
            total = f"{60 * int(minutes)} s" if minutes.isdigit() else minutes
            raise TooLong(
                f"not decided: ran {now - self._started:.0f} s of {total} in Slurm job {worker} on "
                f"{job.node if job else '?'}"
            )
        raise Lost(f"Slurm job {worker} {_ended(state)}{_log(executor.folder / f'{worker}.log')}")

    def _read(self) -> Reply | None:
        path = self._executor.folder / f"{self.key}{pilot.REPLY}"
        version, reply = pickle.loads(path.read_bytes())  # noqa: S301 - from our own worker
        path.unlink(missing_ok=True)
        if version != moediag.__version__:  # of a command that was killed, and updated since
            self.put()
            return None
        self._executor.open.pop(self.key, None)
        found: Reply = reply
        return found

    def cancel(self) -> None:
        executor = self._executor
        executor.open.pop(self.key, None)
        for suffix in (pilot.CALL, pilot.ALONE):
            (executor.folder / f"{self.key}{suffix}").unlink(missing_ok=True)
        held = holder(self.key, executor.names(again=True))
        if held is not None:
            executor.cancel(held[0])
            (executor.folder / f"{self.key}.{held[0]}.{held[1]}{pilot.TAKEN}").unlink(
                missing_ok=True
            )


def job_name(folder: Path) -> str:
    """Returns the name of the jobs of the campaign in ``folder``."""
    where = str(folder.resolve())
    return f"moediag-{folder.resolve().name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def key_of(name: str) -> str:
    """Returns the base name of an item's files."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:80] + f"-{digest}"


def holder(key: str, names: frozenset[str]) -> tuple[str, int] | None:
    """Returns (job of the worker that has the item, its place among those it took)."""
    for name in names:
        if name.startswith(f"{key}.") and name.endswith(pilot.TAKEN):
            worker, number = name[len(key) + 1 : -len(pilot.TAKEN)].split(".")
            return worker, int(number)
    return None


def cancel_orphans(folder: Path) -> None:
    """Ends the workers that a killed command left, before the campaign goes on without Slurm."""
    if (folder / FOLDER).is_dir() and shutil.which("scancel"):
        _cancel_all(squeue.run, job_name(folder))


def _cancel_all(run: Run, name: str) -> None:
    """Also ends jobs whose ids are unknown."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run("scancel", f"--name={name}")


def _answers(run: Run) -> None:
    try:
        done = run("sinfo", "--noheader")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"Slurm does not answer: {error}", "Type `sinfo` to check it.") from None
    if done.returncode:
        raise MachineError(f"Slurm does not answer: {_last(done.stderr)}", "Type `sinfo` to check.")


def _ended(state: str) -> str:
    return f"ended as {state}" if state else "is gone from squeue"


def _log(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f", {path.name} ends: {_last(path.read_text('utf-8', 'replace'))}"
    return ""


def _last(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
