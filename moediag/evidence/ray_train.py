"""Ray Train's warning that not all ranks have called `ray.train.report`.

Format: ray-project/ray, python/ray/train/v2/_internal/execution/checkpoint/sync_actor.py
(`BROADCAST_PERIODIC_WARNING`, Ray 2.44). It repeats until all ranks have come. Its ranks are those
of the job.
"""

from __future__ import annotations

import re

from moediag.evidence.horovod import GOES_ON
from moediag.evidence.model import Report
from moediag.result.wording import ranks

_BEGINS = re.compile(
    r"`(?P<call>[\w.]{1,80})` has not been called by all (?P<size>\d{1,6}) workers in the group"
)
_WAITING = re.compile(r"\{(?P<waiting>\d{1,7}: [\d.]{1,30}(?:, \d{1,7}: [\d.]{1,30})*)\}")


def read(text: str) -> tuple[Report, ...]:
    """What the last warning in a text says; () without any, or if the job went on after it."""
    begins = list(_BEGINS.finditer(text))
    waiting = _WAITING.search(text, begins[-1].end()) if begins else None
    if waiting is None or GOES_ON.search(text, waiting.end()):
        return ()
    head, size = begins[-1], int(begins[-1]["size"])
    waits = dict(pair.split(": ") for pair in waiting["waiting"].split(", "))
    absent = tuple(rank for rank in range(size) if str(rank) not in waits)
    seconds = max(map(float, waits.values()))
    said = f"{ranks(absent)} did not call {head['call']}, and {ranks(map(int, waits))} did"
    # Of many that did not come, those that came may be wrong.
    kind = "not-called" if absent and 2 * len(absent) < size else "called-by-few"
    about = absent if kind == "not-called" else ()
    return (Report(kind, about=about, size=size, seconds=seconds, detail=said),) if absent else ()
