"""Records what one rank does: collectives and their parameters, tokens per expert, lost gradients.

The job's source and its numbers stay as they are, and an error of the recorder never ends the job.
"""

from __future__ import annotations

from typing import Sequence, Union

from moediag.recorder import start
from moediag.recorder.core import Recorder
from moediag.recorder.start import install

__all__ = ["Recorder", "decision", "install"]


def decision(what: str, value: Union[float, str, Sequence[str]]) -> None:
    """Says which branch this rank takes, before it takes it, for a job that knows that others may
    take another one; does nothing where no recorder is installed.

    ``value``: a number (``decision("micro-batches", 3)``), the names of what the rank has
    (``decision("metric", list(metrics))``), or words that follow "rank 1 "
    (``decision("optimizer step", "skipped optimizer.step()")``). ``what`` names one of what is
    counted or listed. Where ranks differ, the diagnosis says so beside the first divergence.
    """
    if start.installed is not None and start.installed.active:
        given = value if isinstance(value, (str, int, float)) else list(value)
        start.installed.decision(what, given)
