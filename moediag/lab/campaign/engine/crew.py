"""Runs items: one in this thread, or several in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T")


class Crew(Generic[Q, T]):
    """Runs up to ``jobs`` items at once. Leaving the context ends running ones with ``stop``. A
    single item runs in this thread, so that signals reach it as in any run."""

    def __init__(self, jobs: int, work: Callable[[Q], T], stop: Callable[[], None]) -> None:
        self._jobs = jobs
        self._work = work
        self._stop = stop
        self._begun: list[Q] = []
        self._running: dict[Future[T], Q] = {}
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="item") if jobs > 1 else None

    def __enter__(self) -> Crew[Q, T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            if self._running:
                self._stop()
            self._threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, item: Q) -> None:
        """Starts ``item`` unless it is running or all slots are used. Unwanted items continue."""
        if self._threads is None:
            self._begun = [item]
        elif item not in self._running.values() and len(self._running) < self._jobs:
            self._running[self._threads.submit(self._work, item)] = item

    def finished(self) -> Iterator[tuple[Q, T]]:
        """Waits for at least one item; raises an item's exception after the successful ones."""
        for item in self._begun:
            yield item, self._work(item)
        self._begun = []
        if self._running:
            done = wait(self._running, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=lambda f: f.exception() is not None):
                yield self._running.pop(future), future.result()
