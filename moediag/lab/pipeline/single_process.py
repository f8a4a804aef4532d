"""Trials whose task runs in one process and leaves one file as its answer."""

from __future__ import annotations

from pathlib import Path

from moediag.evidence.launch_record import LaunchRecord
from moediag.lab.pipeline.trials import last_line
from moediag.protocol import output_file

# Nothing is downloaded: families that load code or kernels from the hub fail at once.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def why_no_answer(record: LaunchRecord, folder: Path) -> str:
    """Returns why the single process of a trial left no answer in ``folder``."""
    if record.timed_out:
        return "the time limit was reached"
    if record.launch_error:
        return record.launch_error
    ended = record.exits.get(0)
    said = last_line(folder / output_file(0))
    return said or (f"the process ended: {ended}" if ended else "the process left no answer")
