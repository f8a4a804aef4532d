"""Consoles that honour NO_COLOR, pipes and CI."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from moediag.report import stdout

PIPE_WIDTH = 100  # a log has no width


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Continues after the reader closed the pipe, so that the exit code stays correct."""
        self.quiet = True
        stdout.nowhere()


def output(no_color: bool = False) -> Console:
    """Returns the console of stdout."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return _Stdout(width=width, no_color=no_color or None, highlight=False, emoji=False)


def watched_stderr(no_color: bool = False) -> Console | None:
    """Returns the console of stderr in a terminal; None in pipes, logs and CI."""
    console = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False)
    watched = console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")
    return console if watched else None
