"""Bounded time: what runs when the time is up is ended as by Ctrl-C, and told apart from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from moediag.report.progress import Observer, Silent

if TYPE_CHECKING:
    from moediag.launch.settings import Progress
    from moediag.result.run_result import RunResult, TrialResult
    from moediag.scenario.plan import Plan


class Clock:
    """``stop`` is set, and ``then`` called, after ``seconds``. Use as a context manager."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def _up(self) -> None:
        self.stop.set()
        if self._then is not None:
            self._then()


class Bounded(Silent):
    """Passes everything on to ``observer``, and ends the building of an environment when the clock
    is up; launches look at :attr:`Clock.stop` themselves."""

    def __init__(self, observer: Observer, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock

    def series(self, trials: Sequence[int]) -> None:
        self._observer.series(trials)

    def plan(self, plan: Plan) -> None:
        self._observer.plan(plan)

    def stack(self, key: str, text: str, fraction: float | None) -> None:
        if self._clock.up:
            raise KeyboardInterrupt
        self._observer.stack(key, text, fraction)

    def trial_started(self, name: str) -> None:
        if self._clock.up:
            raise KeyboardInterrupt
        self._observer.trial_started(name)

    def trial_progress(self, name: str, progress: Progress) -> None:
        self._observer.trial_progress(name, progress)

    def trial_finished(self, result: TrialResult) -> None:
        self._observer.trial_finished(result)

    def finished(self, result: RunResult) -> None:
        self._observer.finished(result)
