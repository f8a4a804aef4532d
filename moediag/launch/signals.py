"""Handles the signals that end moediag. All have the same meaning, and none interrupts the cleanup.

SIGTERM (a scheduler, a cancelled CI job) and SIGHUP (a closed terminal) mean what Ctrl-C (SIGINT)
means: end the ranks, keep the evidence, exit code 130. Only SIGKILL leaves no time for that. They
differ in the first signal that a watched job gets, see :func:`shutdown.of_job`. A signal that
moediag inherits as ignored stays ignored, as in every POSIX program: SIGHUP under ``nohup``, SIGINT
in a background job of a script. SIGTERM then still ends moediag.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from moediag.errors import ExitCode

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def as_interrupts(*, for_good: bool = False) -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does in Python. An ignored signal
    stays ignored, and an installed handler stays.

    ``for_good``: the process ends afterwards. After an interruption all of these signals are
    ignored: nothing is left to interrupt, and another one would only print a traceback from the
    interpreter's own shutdown.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [sig for sig in ENDING[1:] if signal.getsignal(sig) == signal.SIG_DFL]
    for sig in mine:
        signal.signal(sig, _interrupt)
    try:
        yield
    except BaseException as error:
        if for_good and _is_interruption(error):
            for sig in ENDING:
                signal.signal(sig, signal.SIG_IGN)
            mine = []
        raise
    finally:
        for sig in mine:
            signal.signal(sig, signal.SIG_DFL)


@contextlib.contextmanager
def held() -> Iterator[list[int]]:
    """Defers these signals while processes are ended or results are written, which takes a bounded
    time. The list has the received signals; the caller must act on them afterwards."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        came.append(number)

    # None: a handler that was not installed from Python, which could not be put back.
    changed = [sig for sig in ENDING if signal.getsignal(sig) not in (signal.SIG_IGN, None)]
    previous = [(sig, signal.signal(sig, note)) for sig in changed]
    try:
        yield came
    finally:
        for sig, handler in previous:
            signal.signal(sig, handler)


def of_interrupt(error: KeyboardInterrupt) -> int:
    """Returns the signal that raised ``error``; SIGINT if Python's own handler or moediag did."""
    return next((number for number in error.args if isinstance(number, int)), signal.SIGINT)


def _is_interruption(error: BaseException) -> bool:
    code = getattr(error, "exit_code", getattr(error, "code", None))
    return isinstance(error, KeyboardInterrupt) or code == ExitCode.INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt(number)
