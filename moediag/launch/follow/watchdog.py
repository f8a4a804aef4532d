"""Decides from progress and CPU time, never from the clock alone, whether a launch hangs.

A launch hangs if for a whole quiescence window no rank recorded anything, no rank used or wanted a
CPU, and a rank is blocked in a collective. A fixed timeout would report slow imports on a busy
machine as a hang: such a machine only stretches CPU time, and a rank without a CPU is still
runnable.

A rank that waits for its GPU spins, which uses CPU time without doing work. So on GPUs the stacks
of busy ranks are read: if every rank is in a collective or waits for its device, that is a hang,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moediag.evidence.model import Stall
from moediag.launch.rank_sample import RankSample

# The recorder's and gloo's threads use some CPU: this share of the window does not count as work.
CPU_SHARE = 0.02
# A rank that is runnable or waits for a disk in more than this share of samples is working.
RUNNABLE_SHARE = 0.2
LOOK_AGAIN = 10.0  # seconds between two reads of native frames: each stops a rank for a moment
ON_DEVICE = 5.0  # windows that a device may compute without communication
MIN_LOOKS = 10  # samples needed to decide: the watchdog itself may be starved of CPU


class Watchdog:
    """Observes samples of all ranks and detects when they hang.

    ``blocked`` returns which of the given ranks have a collective on their stack; it is called once
    per quiet window, and only if no heartbeat shows a collective. ``spinning``, for ranks on GPUs,
    returns which of the given ranks wait for their devices.
    """

    def __init__(
        self,
        window: float,
        started: float,
        blocked: Callable[[Sequence[int]], Sequence[int]] = lambda _: (),
        spinning: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self.window = window
        self.started = started
        self._blocked = blocked
        self._spinning = spinning
        self._silent: float | None = None  # since when no rank records anything, on GPUs
        self._looked = float("-inf")
        self._anchor: float | None = None  # since when nothing changes
        self._progress: tuple[tuple[int, int, bool], ...] = ()
        self._cpu: dict[int, float] = {}
        self._looks = 0
        self._runnable: dict[int, int] = {}
        self.by_stack: tuple[int, ...] = ()  # last result of ``blocked`` in this pause

    def observe(self, now: float, samples: Sequence[RankSample]) -> Stall | None:
        """Returns a stall, or None. ``now`` is any clock in seconds, used only here."""
        live = [s for s in samples if s.alive]
        if self._spinning is not None:
            stall = self._on_devices(now, samples, live)
            if stall is not None:
                return stall
        if not live or not all(s.known for s in samples) or self._moved(samples):
            self._restart(now, samples)
            return None
        self._looks += 1
        for s in live:
            self._runnable[s.rank] = self._runnable.get(s.rank, 0) + s.runnable
        if self._anchor is None or now - self._anchor < self.window or self._looks < MIN_LOOKS:
            return None
        if max(self._runnable.values(), default=0) > RUNNABLE_SHARE * self._looks:
            self._restart(now, samples)
            return None
        waiting = [s.rank for s in live if s.state == "in-collective"]
        if not waiting:
            waiting = list(self._blocked([s.rank for s in live]))
            self.by_stack = tuple(waiting)
        if not waiting:
            self._restart(now, samples)
            return None
        return self.stall(samples, waiting)

    def _on_devices(
        self, now: float, samples: Sequence[RankSample], live: Sequence[RankSample]
    ) -> Stall | None:
        """Returns a stall if no rank records events and all wait in collectives or for devices."""
        assert self._spinning is not None
        progress = tuple((s.rank, s.progress, s.alive) for s in samples)
        if self._silent is None or progress != self._progress or not live:
            self._silent = now
        if now - self._silent < ON_DEVICE * self.window or now - self._looked < LOOK_AGAIN:
            return None
        if not all(s.known for s in samples) or any(s.stopped for s in live):
            return None
        if any(s.progress < 0 for s in live):
            return None  # not recorded, as in timings
        waiting = {s.rank for s in live if s.state == "in-collective"}
        rest = [s.rank for s in live if s.rank not in waiting]
        self._looked = now
        waiting |= set(self._spinning(rest))
        there = len(waiting) == len(live)
        return self.stall(samples, sorted(waiting)) if there else None

    def _moved(self, samples: Sequence[RankSample]) -> bool:
        progress = tuple((s.rank, s.progress, s.alive) for s in samples)
        if progress != self._progress:
            return True
        allowed = CPU_SHARE * self.window
        return any(s.alive and s.cpu - self._cpu.get(s.rank, 0.0) > allowed for s in samples)

    def _restart(self, now: float, samples: Sequence[RankSample]) -> None:
        self._anchor = now
        self._progress = tuple((s.rank, s.progress, s.alive) for s in samples)
        self._cpu = {s.rank: s.cpu for s in samples}
        self._looks = 0
        self._runnable = {}
        self.by_stack = ()

    def stall(self, samples: Sequence[RankSample], waiting: Sequence[int]) -> Stall:
        """Returns the stall that ``samples`` show; a stopped rank does not count as waiting."""
        waiting = [s.rank for s in samples if s.rank in waiting and not s.stopped]
        last = max((s.time for s in samples), default=0.0)
        elsewhere = tuple(s.rank for s in samples if s.rank not in waiting)
        return Stall(
            at=max(0.0, last - self.started),
            window=self.window,
            waiting=tuple(waiting),
            elsewhere=elsewhere,
        )
