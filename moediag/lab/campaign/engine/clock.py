"""A time limit that ends work as Ctrl-C does and can be distinguished from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Sets ``stop`` and calls ``then`` after ``seconds``. A context manager."""

    def __init__(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        self.stop = threading.Event()
        self._then = then
        self._end = time.monotonic() + seconds
        self._timer = threading.Timer(max(0.0, seconds), self._up)
        self._timer.daemon = True

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def up(self) -> bool:
        return self.stop.is_set()

    def __enter__(self) -> Clock:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _up(self) -> None:
        self.stop.set()
        if self._then is not None:
            self._then()
