"""The rank's heartbeat: 64 shared bytes that a watchdog reads without involving the rank."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from typing import Optional

from moediag.protocol import Heartbeat

_MAGIC, _pack_into = Heartbeat.MAGIC, Heartbeat.LAYOUT.pack_into
_pack_turns, _TURNS_AT = Heartbeat.TURNS.pack_into, Heartbeat.LAYOUT.size
STARTING, RUNNING, IN_COLLECTIVE, FINISHED = range(len(Heartbeat.STATES))


class HeartbeatWriter:
    """Writes :class:`moediag.protocol.Heartbeat` into a shared mapping of ``path``.

    A mapping needs no system call per write, and the kernel keeps the bytes however the process
    ends.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be made, also on a full disk."""
        self.progress = 0
        self.step = 0
        self.turns = 0
        self.collective = -1
        self.state = STARTING
        self._time = time.time()
        self._assumed = False  # ``collective`` is what :meth:`assume` said
        # The recorder's thread beats, too: without the lock it could overwrite the rank's entry
        # into a collective with older values. Re-entrant, because a signal handler may beat.
        self._lock = threading.RLock()
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Blocks on the disk: on a full one, a write to a mapping without them kills the rank.
            if os.pwrite(fd, bytes(Heartbeat.SIZE), 0) < Heartbeat.SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self._map = mmap.mmap(fd, Heartbeat.SIZE)
        finally:
            os.close(fd)
        self._put()

    # enter, leave and beat run for every call of the job, so they write by themselves.

    def _put(self) -> None:
        _pack_into(
            self._map, 0, _MAGIC, self.progress, self.collective, self.state, self._time, self.step
        )

    def beat(self) -> None:
        """Counts one more recorded event."""
        with self._lock:
            self.progress += 1
            if self._assumed:
                self._withdraw()
            if self.state == STARTING:
                self.state = RUNNING
            self._time = now = time.time()
            _pack_into(
                self._map, 0, _MAGIC, self.progress, self.collective, self.state, now, self.step
            )

    def turn(self) -> None:
        """Counts a batch or a forward."""
        self.turns += 1
        _pack_turns(self._map, _TURNS_AT, self.turns)

    def enter(self, collective: int, events: int = 0) -> int:
        """Marks the rank as in ``collective`` and counts ``events``, written but not counted yet;
        returns the collective that it was in before, or -1."""
        with self._lock:
            if self._assumed:
                self._withdraw()
            self.progress += events
            before, self.collective, self.state = self.collective, collective, IN_COLLECTIVE
            self._time = now = time.time()
            _pack_into(
                self._map, 0, _MAGIC, self.progress, collective, IN_COLLECTIVE, now, self.step
            )
        return before

    def leave(self, before: int = -1) -> None:
        state = RUNNING if before < 0 else IN_COLLECTIVE
        with self._lock:
            self.collective, self.state = before, state
            self._time = now = time.time()
            _pack_into(self._map, 0, _MAGIC, self.progress, before, state, now, self.step)

    def assume(self, collective: Optional[int]) -> None:
        """Marks the rank, which has stopped, as waiting in ``collective``, -1 if it is not known
        which, without having entered it; None withdraws that. The next event withdraws it, too.
        This is no progress: the time stays."""
        with self._lock:
            if self._assumed:
                self._withdraw()
            if self.state == RUNNING and collective is not None:
                self.collective, self.state, self._assumed = collective, IN_COLLECTIVE, True
            self._put()

    def _withdraw(self) -> None:
        self.collective, self.state, self._assumed = -1, RUNNING, False

    def finish(self) -> None:
        self.state, self.collective, self._time = FINISHED, -1, time.time()
        self._put()

    def close(self) -> None:
        self._map.close()
