"""Writes text to stdout, for commands that need no console. If the reader closes the pipe (`| head
-1`), the output ends but the command's exit code stays correct."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from moediag.report.printable import in_json, printable


def write(text: str) -> None:
    """Writes and flushes, so that a closed pipe is detected here and not at exit. Characters that
    stdout cannot encode are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere()


def line(text: str = "") -> None:
    """Writes lines for a person."""
    write(printable(text) + "\n")


def data(value: Any) -> None:
    """Writes one JSON object."""
    write(in_json(json.dumps(value, indent=1, ensure_ascii=False, default=str)) + "\n")


def nowhere() -> None:
    """Discards everything written to stdout from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
