"""Ends a launch with SIGINT, SIGTERM and SIGKILL, and checks that nothing is left."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence

from moediag.launch.processes import Family, Process

STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def end(
    family: Family, graces: Sequence[float], asked: Sequence[int] = ()
) -> tuple[dict[Process, str], list[int]]:
    """Ends every process of ``family``. ``asked``: the signals that came to moediag meanwhile, as
    :func:`signals.held` collects them; each further one ends a grace, but not the last one: SIGKILL
    has its effect a moment later.

    Returns the signal that ended each process, and the pids that survived SIGKILL for its grace (a
    process stuck in the kernel).
    """
    gone: dict[Process, str] = {}
    before = _alive(family)
    for step, grace in zip(STEPS, graces, strict=True):
        if not before:
            break
        hurry = asked if step is not STEPS[-1] else ()
        known = len(hurry)
        family.signal(step)
        family.wait(grace, functools.partial(_more, hurry, known))
        after = _alive(family)
        gone.update(dict.fromkeys(before - after, step.name))
        before = after
    return gone, sorted(process.pid for process in before)


def _more(asked: Sequence[int], known: int) -> bool:
    return len(asked) > known


def _alive(family: Family) -> set[Process]:
    return {stat.process for stat in family.alive().values()}
