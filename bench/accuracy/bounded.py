"""Runs a launcher and stops it with everything it started after a time limit. torchrun gives its
ranks their own sessions, so ending its process group is not enough."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def environment(**more: str) -> dict[str, str]:
    return dict(os.environ, OMP_NUM_THREADS="1", **more)


def run(
    command: Sequence[str], env: Mapping[str, str], stdout: Path, stderr: Path, seconds: float
) -> int | None:
    """Returns the exit code; None if it was stopped after ``seconds``."""
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process.pid)
            process.wait()


def end(pid: int) -> None:
    """Kills ``pid`` and its descendants, parents first, so that none is restarted."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
