"""Ending a launch: interrupt, terminate, kill, short graces, and proof that it worked."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from moediag.launch.processes import Family

STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def end(family: Family, graces: Sequence[float]) -> tuple[dict[int, str], list[int]]:
    """Ends every process of ``family``.

    Returns the signal after which each living process was gone (by pid), and the pids that even
    SIGKILL did not remove within its grace (a process stuck in the kernel).
    """
    gone: dict[int, str] = {}
    before = set(family.alive())
    for step, grace in zip(STEPS, graces, strict=True):
        if not before:
            break
        family.signal(step)
        family.wait(grace)
        after = set(family.alive())
        gone.update(dict.fromkeys(before - after, step.name))
        before = after
    return gone, sorted(before)
