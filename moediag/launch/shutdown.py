"""Ends a launch with SIGINT, SIGTERM and SIGKILL, and checks that nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from moediag.launch.processes import Family, Process

STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def end(family: Family, graces: Sequence[float]) -> tuple[dict[Process, str], list[int]]:
    """Ends every process of ``family``.

    Returns the signal that ended each process, and the pids that survived SIGKILL for its grace (a
    process stuck in the kernel).
    """
    gone: dict[Process, str] = {}
    before = _alive(family)
    for step, grace in zip(STEPS, graces, strict=True):
        if not before:
            break
        family.signal(step)
        family.resume()
        family.wait(grace)
        after = _alive(family)
        gone.update(dict.fromkeys(before - after, step.name))
        before = after
    return gone, sorted(process.pid for process in before)


def _alive(family: Family) -> set[Process]:
    return {stat.process for stat in family.alive().values()}
