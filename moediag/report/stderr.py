"""Writes progress and errors to stderr, a line each."""

from __future__ import annotations

import contextlib
import sys

from moediag.report.printable import printable


def line(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()
