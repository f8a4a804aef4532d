"""The `moediag` command line: each module parses one command, calls, and returns its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["is_interruption", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. Ctrl-C while modules are imported needs no traceback
    either."""
    try:
        from moediag.cli import app
    except (KeyboardInterrupt, RuntimeError) as error:
        if not is_interruption(error):
            raise
        sys.stderr.write("error: interrupted\n")
        return 130  # ExitCode.INTERRUPTED, whose module may be the one that was interrupted
    return app.main(arguments)


def is_interruption(error: BaseException) -> bool:
    """Whether the error is Ctrl-C. Before 3.12 Python makes a RuntimeError of one that comes while
    a class is made (in ``__set_name__``)."""
    made = error.__cause__ if isinstance(error, RuntimeError) else error
    return isinstance(made, KeyboardInterrupt)
