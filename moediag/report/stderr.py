"""Writes progress and errors to stderr, a line each."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

from moediag.report.printable import printable


def line(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


def width() -> int:
    """Columns of stderr; 100 in a pipe or a log."""
    if sys.stderr.isatty() or os.environ.get("COLUMNS"):
        return min(shutil.get_terminal_size().columns, 120)
    return 100
