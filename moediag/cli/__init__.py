"""The `moediag` command line: each module parses one command, calls, and returns its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. Ctrl-C while modules are imported needs no traceback
    either."""
    try:
        from moediag.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return 130  # ExitCode.INTERRUPTED, whose module may be the one that was interrupted
    return app.main(arguments)
