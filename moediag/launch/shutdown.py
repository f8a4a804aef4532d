"""Ends a launch with SIGINT, SIGTERM and SIGKILL, and checks that nothing is left."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Sequence

from moediag.launch import signals
from moediag.launch.processes import Family, Process

STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
KILLED = 5.0  # seconds that SIGKILL may take
# A scheduler may send SIGTERM twice: a job that saves its state must not be killed for that.
_HURRIED_BY = {
    signal.SIGINT: frozenset(signals.ENDING),
    signal.SIGTERM: frozenset({signal.SIGINT}),
    signal.SIGKILL: frozenset(),  # it has its effect a moment later
}


def end(
    family: Family, graces: Sequence[float], asked: Sequence[int] = ()
) -> tuple[dict[Process, str], list[int]]:
    """Ends every process of ``family``. ``graces``: seconds after each signal; one of 0 leaves its
    signal out. ``asked``: the signals that came to moediag meanwhile, as :func:`signals.held`
    collects them. A further one ends the grace of SIGINT, a further Ctrl-C also that of SIGTERM.

    Returns the signal that ended each process, and the pids that survived SIGKILL for its grace (a
    process stuck in the kernel).
    """
    gone: dict[Process, str] = {}
    before = _alive(family)
    for step, grace in zip(STEPS, graces, strict=True):
        if not before:
            break
        if not grace:
            continue
        known = len(asked)
        family.signal(step)
        family.wait(grace, functools.partial(_hurry, step, asked, known))
        after = _alive(family)
        gone.update(dict.fromkeys(before - after, step.name))
        before = after
    return gone, sorted(process.pid for process in before)


def of_job(seconds: float, asked: Iterable[int], hangs: bool) -> tuple[float, float, float]:
    """Returns the graces of a user's job that gets ``seconds`` until SIGKILL. ``asked``: the
    signals to moediag so far. If one is not SIGINT, the job gets SIGTERM at once, as without
    moediag: a job saves its state on SIGTERM, and SIGINT may have no effect while torch is
    imported. Ranks that hang do not answer SIGINT, but their launcher may."""
    first = min(1.0, seconds / 2) if hangs else seconds / 2
    if any(sig != signal.SIGINT for sig in asked):
        first = 0.0
    return first, seconds - first, KILLED


def _hurry(step: signal.Signals, asked: Sequence[int], known: int) -> bool:
    return not _HURRIED_BY[step].isdisjoint(asked[known:])


def _alive(family: Family) -> set[Process]:
    return {stat.process for stat in family.alive().values()}
