"""Starts the comparison of measurements with the Python of the job, which has torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from moediag.launch.watched import PACKAGE

PROGRAM = PACKAGE / "ranks" / "compare.py"
_TIMEOUT = 3600.0  # seconds


def compare(python: str, target: Path, job: Path, references: Sequence[Path]) -> str:
    """Writes the outcomes of the ranks into ``target``; returns why that failed, else ""."""
    command = [python, str(PROGRAM), *map(str, (target, job, *references))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"
