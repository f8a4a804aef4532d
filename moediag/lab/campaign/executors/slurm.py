"""Slurm: a job is one of Slurm's, through submitit.

Its state comes from squeue: sacct, which submitit asks, needs an accounting database.
"""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moediag.errors import MachineError
from moediag.lab.campaign.executors.executor import Call, Executor, Job, Lost, Reply
from moediag.lab.campaign.executors.worker import perform

KEYS = (
    "partition", "account", "qos", "time", "mem", "cpus_per_task", "gpus_per_node", "constraint",
    "nodelist", "exclude", "exclusive",
)  # fmt: skip
PACKAGE = "submitit"
PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
NEEDS = "Type: pip install 'moediag[slurm]', on a machine with Slurm's commands (sbatch, squeue)."
FOLDER = "slurm"  # submitit's files, in the campaign's folder
PATIENCE = 30.0  # seconds that a result may take to show in a shared folder
ASKING = 20.0  # seconds for one squeue
_ALIVE = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING",
    "STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
)  # fmt: skip


class Slurm(Executor):
    """Each call is one job of one task."""

    def __init__(self, arguments: Mapping[str, str], folder: Path, limit: float) -> None:
        """``limit``: seconds, the default of ``time=``, which is in minutes. Raises MachineError if
        Slurm does not answer."""
        self._folder = folder.resolve() / FOLDER
        self._arguments: dict[str, Any] = {k: _value(v) for k, v in arguments.items()}
        self._arguments.setdefault("time", math.ceil(limit / 60))
        _answers()
        import submitit

        logging.getLogger("submitit").setLevel(logging.ERROR)
        self._submitit = submitit

    def submit(self, name: str, call: Call) -> Job:
        # One per job: submitit's are not safe between threads. Remote counts lost jobs, so that
        # Slurm must not requeue them.
        one = self._submitit.SlurmExecutor(folder=self._folder, max_num_timeout=0)
        one.update_parameters(
            job_name=f"moediag {name}", stderr_to_stdout=True,
            additional_parameters={"no_requeue": True}, **self._arguments,
        )  # fmt: skip
        try:
            return SlurmJob(one.submit(perform, *call.arguments))
        except Exception as error:  # submitit raises what sbatch printed
            raise MachineError(
                f"sbatch does not accept the job: {_last(str(error))}",
                "Slurm's options are given with --executor-arg: partition=, account=, time=, ….",
            ) from error


class SlurmJob(Job):
    def __init__(self, job: Any) -> None:
        self._job = job
        self._ended: float | None = None

    def reply(self) -> Reply | None:
        if self._job.paths.result_pickle.exists():
            return self._result()
        state = _state(self._job.job_id)
        if state in _ALIVE:
            return None
        if self._ended is None:
            self._ended = time.monotonic()
        if state in ("", "COMPLETED") and time.monotonic() - self._ended < PATIENCE:
            return None
        log = Path(self._job.paths.stdout)
        with contextlib.suppress(OSError):
            said = _last(log.read_text(encoding="utf-8", errors="replace"))
            raise Lost(f"Slurm job {self._job.job_id} {_words(state)}, {log.name} ends: {said}")
        if state == "FAILED":
            raise MachineError(
                f"Slurm job {self._job.job_id} failed and left no log in {log.parent}",
                "The nodes must see that folder: put --out on a shared file system.",
            )
        raise Lost(f"Slurm job {self._job.job_id} {_words(state)}")

    def _result(self) -> Reply:
        try:
            reply: Reply = self._job.result()
        except Exception as error:  # the function did not run: it raises nothing itself
            raise MachineError(
                f"a Slurm job cannot start moediag: {_last(str(error))}", NEEDS
            ) from error
        return reply

    def cancel(self) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._job.cancel()


def _answers() -> None:
    try:
        done = _run("sinfo", "--noheader")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"Slurm does not answer: {error}", "Type `sinfo` to check it.") from None
    if done.returncode:
        raise MachineError(f"Slurm does not answer: {_last(done.stderr)}", "Type `sinfo` to check.")


def _state(job_id: str) -> str:
    """Returns squeue's word; "" for a job that it has forgotten."""
    try:
        done = _run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T")
    except (OSError, subprocess.TimeoutExpired):
        return _ALIVE[0]  # nothing is known; the time limit of the item goes on
    if done.returncode and "Invalid job id" not in done.stderr:
        return _ALIVE[0]
    return done.stdout.strip()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=False)


def _words(state: str) -> str:
    return f"ended as {state}" if state else "is gone from squeue"


def _value(text: str) -> Any:
    if text in ("true", "True"):
        return True
    return int(text) if text.isdigit() else text


def _last(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
