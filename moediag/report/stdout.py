"""Writes text to stdout, for commands that need no console. If the reader closes the pipe (`| head
-1`), the output ends but the command's exit code stays correct."""

from __future__ import annotations

import os
import sys


def write(text: str) -> None:
    """Writes and flushes, so that a closed pipe is detected here and not at exit."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere()


def line(text: str = "") -> None:
    write(text + "\n")


def nowhere() -> None:
    """Discards everything written to stdout from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
