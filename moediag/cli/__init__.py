"""The `moediag` command line: each module parses one command, calls, and returns its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["is_interruption", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. Ctrl-C prints no traceback, not even while modules are
    imported."""
    try:
        from moediag.cli import app

        return app.main(arguments)
    except (KeyboardInterrupt, RuntimeError) as error:
        if not is_interruption(error):
            raise
        if arguments is None:  # the process ends: another Ctrl-C would only print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("error: interrupted\n")
        return 130  # ExitCode.INTERRUPTED, whose module may be the one that was interrupted


def is_interruption(error: BaseException) -> bool:
    """Whether the error is Ctrl-C. Before 3.12 Python makes a RuntimeError of one that comes while
    a class is made (in ``__set_name__``)."""
    made = error.__cause__ if isinstance(error, RuntimeError) else error
    return isinstance(made, KeyboardInterrupt)
