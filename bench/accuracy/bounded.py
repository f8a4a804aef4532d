"""A launcher with everything it starts, ended after a time: torchrun gives its ranks sessions of
their own, so ending its process group leaves them."""

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
    """The exit code; None when it was ended after ``seconds``."""
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
    """Kills ``pid`` and all below it, parents first, so that nothing is started again."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
