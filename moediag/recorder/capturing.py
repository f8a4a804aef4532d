"""Tracks whether this process is capturing a CUDA graph. During a capture no other thread may query
an event: in torch's default mode this fails the capture.

It counts the starts and ends of captures, because a stream tells only its own thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

import torch

from moediag.recorder.patches import Patches

PATIENCE = 1.0  # seconds that a capture waits for a running query


class Captures:
    """Counts running captures. Query the device within :meth:`question`: a capture waits for it."""

    def __init__(self) -> None:
        self.asking = threading.Lock()
        self._running = 0

    @property
    def running(self) -> bool:
        return self._running > 0

    @contextlib.contextmanager
    def question(self) -> Iterator[bool]:
        """Whether the device may be asked: no graph is captured, and no other thread asks."""
        if not self.asking.acquire(blocking=False):
            yield False
            return
        try:
            # Under the lock: a capture increments its count before it waits for the lock.
            yield not self.running
        finally:
            self.asking.release()

    def install(self, patches: Patches) -> None:
        graph: Any = getattr(torch.cuda, "CUDAGraph", None)
        if graph is not None:
            patches.replace(graph, "capture_begin", self._begin)
            patches.replace(graph, "capture_end", self._end)

    def _begin(self, original: Any) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._running += 1  # no new queries from here on
            held = self.asking.acquire(timeout=PATIENCE)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._running -= 1
                raise
            finally:
                if held:
                    self.asking.release()

        return capture_begin

    def _end(self, original: Any) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._running = max(0, self._running - 1)

        return capture_end
