"""What the command line says about executors: checked early, opened when the folder is known."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from moediag.errors import MachineError, UsageError
from moediag.lab.campaign.executors import ray_tasks, slurm
from moediag.lab.campaign.executors.executor import Executor
from moediag.lab.campaign.executors.remote import Remote
from moediag.records import dataclass

LOCAL = "local"
RAY = "ray"
SLURM = "slurm"
LIMIT = 3600.0  # seconds
QUEUE = 86400.0  # seconds
_KEYS = {RAY: ray_tasks.KEYS, SLURM: slurm.KEYS}
_NEEDS = {RAY: ray_tasks.NEEDS, SLURM: slurm.NEEDS}


@dataclass(frozen=True, slots=True)
class Choice:
    """``--executor`` and its arguments."""

    kind: str = LOCAL
    arguments: Mapping[str, str] = field(default_factory=dict)
    """For the engine."""
    limit: float = LIMIT
    """Seconds for one item, from its start."""
    queue: float = QUEUE
    """Seconds that an item waits for its start."""
    jobs: int | None = None
    """Jobs at once; None: as many as the command runs items at once."""

    @classmethod
    def parse(cls, kind: str, texts: Sequence[str]) -> Choice:
        """Returns the choice. ``texts``: ``key=value``. Raises UsageError for a key or value that
        the executor does not know, MachineError if its package is missing."""
        found: dict[str, str] = {}
        known = ("jobs", "limit", "queue", *_KEYS.get(kind, ()))
        for text in texts:
            key, _, value = text.partition("=")
            if kind == LOCAL:
                raise UsageError(
                    f"--executor-arg {text}: the local executor has no arguments",
                    "Add --executor slurm or ray.",
                )
            if key not in known or not value:
                raise UsageError(
                    f"--executor-arg {text}: {kind} takes KEY=VALUE with one of these keys: "
                    f"{', '.join(known)}"
                )
            if key in found:
                raise UsageError(f"--executor-arg gives {key} twice: {found[key]} and {value}")
            found[key] = value
        if kind != LOCAL and (missing := _missing(kind)):
            raise MachineError(f"--executor {kind} needs {missing}", _NEEDS[kind])
        limit = _positive("limit", found.pop("limit", str(LIMIT)))
        queue = _positive("queue", found.pop("queue", str(QUEUE)))
        jobs = int(_positive("jobs", found.pop("jobs"))) if "jobs" in found else None
        return cls(kind, found, limit, queue, jobs)

    @property
    def here(self) -> bool:
        """Whether items run on this machine."""
        return self.kind == LOCAL

    def at_once(self, otherwise: int) -> int:
        """Returns how many items run at once; ``otherwise``: without ``jobs=``."""
        return self.jobs or otherwise


HERE = Choice()


@contextlib.contextmanager
def opened(choice: Choice, folder: Path, say: Callable[[str], None]) -> Iterator[Remote | None]:
    """Connects to the engine; None for the local executor, which needs none. ``folder``: of the
    campaign. Raises MachineError if the engine cannot be reached."""
    if choice.kind != SLURM:
        slurm.cancel_orphans(folder)
    if choice.here:
        yield None
        return
    executor = _executor(choice, folder, say)
    remote = Remote(executor, folder, choice.limit, say, queue=choice.queue)
    with contextlib.closing(remote):
        yield remote


def _missing(kind: str) -> str:
    """Returns what this machine lacks, "" if nothing."""
    if kind == RAY:
        found = importlib.util.find_spec(ray_tasks.PACKAGE)
        return "" if found else f"the package {ray_tasks.PACKAGE}"
    lacking = (name for name in slurm.PROGRAMS if shutil.which(name) is None)
    return ", ".join(f"the command {name}" for name in lacking)


def _executor(choice: Choice, folder: Path, say: Callable[[str], None]) -> Executor:
    if choice.kind == SLURM:
        return slurm.Slurm(choice.arguments, folder, choice.limit, say)
    return ray_tasks.RayTasks(choice.arguments, folder, say)


def _positive(key: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 1:
            return float(text)
    raise UsageError(f"--executor-arg {key}={text}: give a number from 1 on")
