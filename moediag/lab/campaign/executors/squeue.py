"""Slurm's jobs of one name, from squeue: asked for all of them at once, and seldom.

sacct, which knows more, needs an accounting database.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from moediag.records import dataclass

PACE = 5.0  # seconds between two questions
LONGEST = 20.0  # seconds for one command of Slurm
FORMAT = "%i|%T|%r|%N"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = (
    "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
)  # fmt: skip
# As long as nobody changes the request or the cluster.
_NEVER = (
    "PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS",
    "AccountNotAllowed", "QOSNotAllowed", "WallDurationPerJobLimit",
)  # fmt: skip

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm with ``said`` on its stdin."""
    return subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=LONGEST, check=False
    )


@dataclass(frozen=True, slots=True)
class Queued:
    """A job as squeue lists it."""

    id: str
    state: str = "PENDING"
    reason: str = "None"
    node: str = ""

    @property
    def waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def alive(self) -> bool:
        return self.waiting or self.state in _RUNNING

    @property
    def never(self) -> bool:
        """Whether it waits for what will not happen."""
        return self.waiting and self.reason.endswith(_NEVER)


def parse(text: str) -> dict[str, Queued]:
    """Returns the jobs by id. ``text``: in :data:`FORMAT`. A reason in parentheses is also a
    list of nodes in some versions, so the reason may contain anything but a bar."""
    found = (line.split("|") for line in text.splitlines() if line.count("|") == 3)
    return {row[0]: Queued(*(word.strip("() ") for word in row)) for row in found}


class Queue:
    """The jobs of one name. Several threads ask at once."""

    def __init__(self, name: str, run: Run = run, pace: float = PACE) -> None:
        self._command = ("squeue", "--noheader", "--states=all", f"--name={name}",
                         f"--format={FORMAT}")  # fmt: skip
        self._run = run
        self._pace = pace
        self._lock = threading.Lock()
        self._jobs: dict[str, Queued] = {}
        self._new: set[str] = set()
        self.unlisted: set[str] = set()
        """Submitted jobs that the first answer afterwards did not have."""
        self._asked = float("-inf")

    def jobs(self) -> Mapping[str, Queued]:
        """Returns the jobs by id; those of the last answer while Slurm does not answer. A job that
        Slurm has forgotten is not among them."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked >= self._pace:
                    self._ask()
            finally:
                self._lock.release()
        return self._jobs

    def submitted(self, job: str) -> None:
        self._new.add(job)
        self._jobs = {**self._jobs, job: Queued(job)}

    def _ask(self) -> None:
        before = set(self._new)
        try:
            done = self._run(*self._command)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            self._new -= before
            listed = parse(done.stdout)
            self.unlisted |= before - listed.keys()
            self._jobs = {**{job: Queued(job) for job in self._new}, **listed}
        self._asked = time.monotonic()
