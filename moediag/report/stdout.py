"""Text to stdout, for commands that need no console. A reader that goes away (`| head -1`) ends
the output, not the command: its exit code stays the truth."""

from __future__ import annotations

import os
import sys


def write(text: str) -> None:
    """Writes and flushes, so that a closed pipe is noticed here and not at exit."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere()


def line(text: str = "") -> None:
    write(text + "\n")


def nowhere() -> None:
    """From now on stdout goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
