"""Records what one rank does: collectives, their parameters, tokens per expert, missing gradients.

It changes neither the job's source nor its results, and a recorder error never ends the job.
"""

from __future__ import annotations

from typing import Sequence, Union

from moediag.recorder import start
from moediag.recorder.core import Recorder
from moediag.recorder.start import install

__all__ = ["Recorder", "decision", "install"]


def decision(what: str, value: Union[float, str, Sequence[str]]) -> None:
    """Records the branch that this rank is about to take; call it where ranks may take different
    branches. Does nothing without an installed recorder.

    ``what`` names one item of what is counted or listed. ``value`` is a number
    (``decision("micro-batches", 3)``), a list of names (``decision("metric", list(metrics))``), or
    words that follow "rank 1 " (``decision("optimizer step", "skipped optimizer.step()")``). If
    ranks differ, the diagnosis shows this beside the first divergence.
    """
    if start.installed is not None and start.installed.active:
        given = value if isinstance(value, (str, int, float)) else list(value)
        start.installed.decision(what, given)
