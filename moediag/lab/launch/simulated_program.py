"""Runs a user's program once, as one simulated rank; nothing that it starts outlives the call."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from moediag import protocol
from moediag.errors import UsageError
from moediag.launch import shutdown, watched
from moediag.launch.capture import source_files
from moediag.launch.processes import Family, Process
from moediag.records import dataclass

_SIMULATOR = "moediag.lab.simulation.program_rank"
_POLL = 0.05
_GRACES = (0.5, 1.0, 5.0)
_SEGMENT_BYTES = 1 << 30  # a lost beginning of the log cannot be compared


@dataclass(frozen=True, slots=True)
class RankRun:
    """How the process of one simulated rank ended."""

    rank: int
    code: int | None
    """Its exit code, negative for a signal; None: the time limit ended it."""
    seconds: float


def run(
    words: Sequence[str], folder: Path, variables: Mapping[str, str], steps: int, timeout: float
) -> RankRun:
    """Runs ``words`` as the rank that ``variables`` names, for at most ``timeout`` seconds. Its
    files go into ``folder``. Raises UsageError if there is no such command."""
    rank = int(variables["RANK"])
    place = folder / protocol.attempt_folder(0)
    place.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    options = watched.JobOptions(segment_bytes=_SEGMENT_BYTES)
    env = watched.environment(folder, token, options, {**os.environ, **variables})
    env[protocol.ENV_SIMULATE] = f"{_SIMULATOR}:{steps}"
    with (place / protocol.output_file(rank)).open("wb") as output:
        try:
            process = subprocess.Popen(
                list(words), env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=watched.end_with_us(),
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"{words[0]} cannot be started: {error.strerror}",
                "Give the program as torchrun gets it: --script 'train.py --config c.yaml'",
            ) from error
    family, started = Family(process.pid, token), Process.of(process.pid)
    began = time.monotonic()
    code = None
    try:
        while (code := process.poll()) is None and time.monotonic() - began < timeout:
            time.sleep(_POLL)
    finally:
        shutdown.end(family, _GRACES)
        process.wait()
        source_files.keep(place, {rank: started})
    return RankRun(rank, code, time.monotonic() - began)
