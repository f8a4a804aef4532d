"""Processes that carry a mark in their environment, so that a test sees what is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MARK = "MOEDIAG_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Returns the living processes with ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def eventually(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(mark: str) -> None:
    """Waits until no process has ``mark``."""
    eventually(lambda: marked(mark) == [], f"left over: {marked(mark)}")
