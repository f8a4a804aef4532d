"""The folder of a run: holds its result and evidence, and is never overwritten."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from moediag.errors import UsageError, says_disk_full


def run_folder(out: Path | None, name: str) -> Path:
    """Makes the run directory: ``out``, or a new one below ``moediag-runs`` named after the time
    and the scenario. Raises UsageError if it exists and is not empty."""
    try:
        out = _new_folder(name) if out is None else out
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        if says_disk_full(error):
            raise
        if isinstance(error, FileExistsError | NotADirectoryError):
            problem = "is a file, or below one"
        else:
            problem = str(error.strerror or error)
        raise UsageError(
            f"--out {out or 'moediag-runs'}: {problem}",
            "Type --out DIR with a folder that can be made and written.",
        ) from error
    if taken:
        raise UsageError(
            f"--out {out}: the folder is not empty",
            "Evidence is never overwritten: give a new folder, or omit --out.",
        )
    return out.resolve()


def _new_folder(name: str) -> Path:
    """Creates a folder; nodes on one disk may start in the same second. Raises OSError."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = Path("moediag-runs")
    base.mkdir(exist_ok=True)
    number = 1
    while True:
        out = base / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{name}-{number}")
        try:
            out.mkdir()
        except FileExistsError:
            number += 1
        else:
            return out
