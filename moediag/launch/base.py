"""The base class of launchers: starts a trial, has it followed and writes its record."""

from __future__ import annotations

import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from moediag import protocol
from moediag.errors import Interrupted, LaunchError, UsageError
from moediag.evidence.launch_record import LaunchRecord
from moediag.launch.processes import ENV_LAUNCH, Family
from moediag.launch.settings import LaunchOptions, OnProgress
from moediag.protocol import TRIAL_FILE, Trial, parse_json

_PYTHONPATH = "PYTHONPATH"
_END = 40  # lines of a log that tell why it ended
# What a launcher's log has if the machine lacks something.
_LACKS = (
    (
        ("failed to map segment", "Cannot allocate memory", "std::bad_alloc"),
        "there is not enough memory: `ulimit -v` shows the shell's limit",
    ),
    (
        ("_multiprocessing.SemLock(",),
        "no semaphore can be made in /dev/shm: type --launcher torchrun, which needs none",
    ),
)


class StackLike(Protocol):
    """The part of a stacks.environment.Stack that a launch needs."""

    @property
    def python(self) -> Path: ...
    @property
    def pythonpath(self) -> list[Path]: ...
    @property
    def key(self) -> str: ...


class Running(ABC):
    """One launched trial."""

    root: int  # pid of the elastic agent or of the single rank
    family: Family

    @abstractmethod
    def poll(self) -> int | None:
        """The root's exit code (negative: the signal that ended it); None while it runs. Raises
        LaunchError if it can no longer be determined."""


# (the launched trial, its description, its folder, its ranks on this node, options, launcher kind,
# progress callback): follows a trial until all its processes are gone.
Follow = Callable[
    [Running, Trial, Path, int, LaunchOptions, str, "OnProgress | None"], LaunchRecord
]


class Launcher(ABC):
    """Runs trials on one stack, one at a time."""

    kind = ""

    def __init__(
        self, stack: StackLike, run_folder: Path, options: LaunchOptions, follow: Follow
    ) -> None:
        self.follow = follow
        self.stack = stack
        self.run_folder = run_folder
        self.options = options
        self.token = uuid.uuid4().hex
        self._one = threading.Lock()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - not every launcher keeps something
        """Ends processes that outlive single trials. Safe to call twice."""

    def local_ranks(self, trial: Trial) -> int:
        """The number of ranks of ``trial`` on this node."""
        if trial.alone:
            return 1
        if trial.world_size % self.options.nnodes:
            raise UsageError(
                f"{trial.world_size} ranks cannot be spread over {self.options.nnodes} nodes"
            )
        return trial.world_size // self.options.nnodes

    def run(
        self, trial: Trial, folder: Path, on_progress: OnProgress | None = None
    ) -> LaunchRecord:
        """Launches ``trial`` and returns its record once all its processes are gone. Its files go
        into ``folder``, which is created if missing. Raises Interrupted after Ctrl-C, once the
        ranks are ended and the record is written."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.options.nnodes == 1:  # nodes may share the folder
            _clear(folder)
        if not (folder / TRIAL_FILE).exists():
            trial.write(folder)
        with self._one:
            begun = time.time()
            try:
                running = self._start(trial, folder.resolve())
            except LaunchError as error:
                record = LaunchRecord(
                    begun, time.time(), launcher=self.kind, launch_error=error.message
                )
            except KeyboardInterrupt:
                self.close()
                record = LaunchRecord(begun, time.time(), launcher=self.kind, interrupted=True)
            else:
                ranks = self.local_ranks(trial)
                record = self.follow(
                    running, trial, folder, ranks, self.options, self.kind, on_progress
                )
            record.write(folder)
        if record.interrupted:
            raise Interrupted(f"interrupted during {trial.name}; evidence is in {folder}")
        return record

    @abstractmethod
    def _start(self, trial: Trial, folder: Path) -> Running:
        """Starts the trial. Raises LaunchError if it cannot be started."""

    def environment(self) -> dict[str, str]:
        """The environment of every process of this launcher."""
        env = dict(os.environ)
        # Without bytecode files, the imports of every later interpreter take 12 s longer.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        # Not the user's PYTHONPATH: a transformers there would replace the one under test.
        env.pop(_PYTHONPATH, None)
        if self.stack.pythonpath:
            env[_PYTHONPATH] = os.pathsep.join(str(p) for p in self.stack.pythonpath)
        env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        if self.options.nnodes == 1 and Path("/sys/class/net/lo").exists():
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.update(self.options.environment)
        env[ENV_LAUNCH] = self.token
        env[protocol.ENV_PARENT] = str(os.getpid())
        main = threading.current_thread() is threading.main_thread()
        env[protocol.ENV_MAIN_THREAD] = "1" if main else "0"
        return env


def _clear(folder: Path) -> None:
    """Removes the files of an earlier launch, so that none is mistaken for one of this launch."""
    for pattern in ("rank-*", "launcher.*", "launch.json", "capture/rank-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def last_words(log: Path, count: int = 5) -> str:
    """Returns what the machine lacks and the last line of a launcher's log if it shows that, else
    its last ``count`` lines; empty if there is no log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    end = "\n".join(lines[-_END:])
    for marks, lack in _LACKS:
        if any(mark in end for mark in marks):
            return f"{lack} ({lines[-1].strip()})"
    return "\n".join(lines[-count:])


def json_lines(text: str) -> list[dict[str, object]]:
    """Returns the JSON objects of ``text``, one per line; skips other lines."""
    found = []
    for line in text.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
