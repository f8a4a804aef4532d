"""Starts the command of a watched job with the recorder in its environment."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import moediag
from moediag import protocol
from moediag.errors import MachineError, UsageError
from moediag.launch.base import Running
from moediag.launch.processes import ENV_LAUNCH, Family
from moediag.records import dataclass

PACKAGE = Path(moediag.__file__).parent
INJECTED = PACKAGE / "ranks" / "inject" / "path"
SEGMENT_BYTES = 4 * 1024 * 1024
_PR_SET_PDEATHSIG = 1
# A scheduler sends these to notify the job, so moediag passes them on.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class WatchedJob(Running):
    """The user's command in its own session; ``root`` is its first process."""

    def __init__(self, process: subprocess.Popen[bytes], token: str) -> None:
        self.process = process
        self.root = process.pid
        self.family = Family(process.pid, token)

    def poll(self) -> int | None:
        return self.process.poll()


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of the recorder in the ranks."""

    guard: bool = False
    """Before each reduction, ranks check that they carry the same parameters."""
    laws_every: int | None = None
    """Check laws at steps 1, 2, 3 and every so many steps; 0: 6, 12, 24, …; None: never."""
    allowed: tuple[str, ...] = ()
    """Laws that the job may break, as ``LAW`` or ``LAW:PATTERN``."""
    segment_bytes: int = SEGMENT_BYTES
    """Size of a log segment of a rank; its log is a ring of two."""
    measure: protocol.MeasureRequest | protocol.StateRequest | None = None
    """What the ranks measure or record, if anything."""
    example: str = "moediag watch -- torchrun --nproc-per-node 8 train.py"
    """The right use of moediag's command, for the error if there is no such command."""


def environment(
    run_folder: Path, token: str, options: JobOptions, base: Mapping[str, str]
) -> dict[str, str]:
    """Returns ``base`` with the variables that load the recorder in every rank."""
    env = dict(base)
    of_another = (
        protocol.ENV_RANK_PID, protocol.ENV_ATTEMPT, protocol.ENV_JOB, protocol.ENV_GUARD,
        protocol.ENV_MEASURE,
        protocol.ENV_LAWS, protocol.ENV_ALLOW, protocol.ENV_SIMULATE,
    )  # fmt: skip
    for name in of_another:
        env.pop(name, None)  # moediag itself may run in a watched job
    path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([str(INJECTED), *([path] if path else [])])
    env[protocol.ENV_WATCH] = str(run_folder.resolve())
    env[protocol.ENV_PACKAGE] = str(PACKAGE)
    env[protocol.ENV_SEGMENT] = str(options.segment_bytes)
    env[ENV_LAUNCH] = token
    if options.guard:
        env[protocol.ENV_GUARD] = "1"
    if options.measure is not None:
        env[protocol.ENV_MEASURE] = options.measure.text()
    if options.laws_every is not None:
        env[protocol.ENV_LAWS] = str(options.laws_every)
    if options.allowed:
        env[protocol.ENV_ALLOW] = json.dumps(options.allowed)
    return env


def start(
    command: Sequence[str],
    run_folder: Path,
    options: JobOptions,
    stdout: int | None = None,
    stderr: int | None = None,
) -> WatchedJob:
    """Starts ``command``. ``stdout``, ``stderr``: its file descriptors; default: those of moediag.

    Raises UsageError if there is no such command, MachineError if it cannot be started."""
    token = uuid.uuid4().hex
    try:
        process = subprocess.Popen(
            list(command),
            env=environment(run_folder, token, options, os.environ),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=end_with_us(),
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no command {command[0]!r}",
            f"Give your training command, unchanged: {options.example}",
        ) from error
    except PermissionError as error:
        raise UsageError(
            f"{command[0]} is not executable",
            f"Type: chmod +x {command[0]}, or put its interpreter in front: python {command[0]}",
        ) from error
    except OSError as error:
        raise MachineError(f"{command[0]} cannot be started: {error.strerror}") from error
    return WatchedJob(process, token)


def end_with_us() -> Callable[[], None] | None:
    """Returns a ``preexec_fn`` that makes the kernel send SIGTERM to the child when moediag is
    killed. The kernel ties this to the forking thread, so only the main thread does it."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    prctl, us = ctypes.CDLL(None).prctl, os.getpid()  # look up nothing after the fork

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != us:
            os._exit(1)

    return request
