"""The `moediag` command line: each module parses one command, calls, and returns its exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["is_interruption", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. Ctrl-C prints no traceback, not even while modules are
    imported."""
    try:
        _complete_streams()
        from moediag.cli import app

        return app.main(arguments)
    except (KeyboardInterrupt, RuntimeError) as error:
        if not is_interruption(error):
            raise
        if arguments is None:  # the process ends: another Ctrl-C would only print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("error: interrupted\n")
        return 130  # ExitCode.INTERRUPTED, whose module may be the one that was interrupted


def _complete_streams() -> None:
    """A closed stream takes text and drops it; one that cannot write a character (LC_ALL=C) writes
    a question mark."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_interruption(error: BaseException) -> bool:
    """Whether the error is Ctrl-C. Before 3.12 Python makes a RuntimeError of one that comes while
    a class is made (in ``__set_name__``)."""
    made = error.__cause__ if isinstance(error, RuntimeError) else error
    return isinstance(made, KeyboardInterrupt)
