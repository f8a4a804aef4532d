"""Detects that a thread of the rank waits, in C++, for a call that C++ issued, or its device for
one that it cannot complete.

The recorder's wrappers see the waits of Python. DDP's reducer issues its calls from C++ and waits
for them there: the innermost Python frame is autograd's, which is also the frame of a backward that
computes. So the wait is proven by three facts together: a call of this thread is open, its
innermost Python frame is one below which torch waits for communication, and the thread slept from
one look to the next without a switch to it. To be seen asleep twice is not enough: a thread that
executes Python sleeps during each look, for the interpreter's lock that the look holds, and on a
busy machine it may get no CPU time in between.

A device that has started a call and does not complete it waits for other ranks, whatever the rank's
threads do meanwhile: autograd's may be in a copy to the host, or in the launch of a kernel whose
code the driver cannot load while the device is busy.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import FrameType
from typing import Callable, Dict, FrozenSet, NamedTuple, Optional, Tuple

import torch

from moediag.recorder import flight
from moediag.recorder.capturing import Captures
from moediag.recorder.completion import Completion
from moediag.recorder.heartbeat import HeartbeatWriter

_TORCH = str(Path(torch.__file__).parent)
# Innermost Python frames of torch below which C++ waits for communication: the engine's callbacks,
# DDP's broadcast of buffers, and everything in torch.distributed.
_ENGINE = (f"{_TORCH}/autograd/graph.py", f"{_TORCH}/autograd/__init__.py")
_PLACES = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/distributed.py", *_ENGINE)

_ASK = 3.0  # seconds between two questions to the device

_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class Look(NamedTuple):
    """What shows whether a thread moved since the last look."""

    call: int
    where: Tuple[str, int]  # its innermost Python frame
    switches: Tuple[str, ...]  # how often it went to sleep, and was interrupted


class NativeWait:
    """Tells the heartbeat which call the rank waits for. The recorder's thread calls :meth:`look`
    while the rank issues nothing."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        completion: Completion,
        frames: Callable[[], Dict[int, FrameType]] = sys._current_frames,
        state: Optional[Callable[[int], Optional[Tuple[str, ...]]]] = None,
        device: Callable[[], bool] = lambda: False,
    ) -> None:
        self._heartbeat = heartbeat
        self._completion = completion
        self._frames = frames
        self._state = state or asleep
        self._before: Optional[Look] = None
        self._device = device

    def look(self) -> None:
        now = self._look()
        waits = now is not None and now == self._before
        self._before = now
        if now is not None and waits:
            self._heartbeat.assume(now.call)
        else:
            self._heartbeat.assume(-1 if self._device() else None)

    def _look(self) -> Optional[Look]:
        """None if the thread that issued the oldest open call does not sleep below torch."""
        found = self._completion.oldest_open()
        if found is None:
            return None
        call, thread = found
        frame = self._frames().get(thread.ident)
        if frame is None or not frame.f_code.co_filename.startswith(_PLACES):
            return None
        switches = self._state(thread.native)
        if switches is None:
            return None
        where = frame.f_code.co_filename, frame.f_lineno
        return Look(call, where, switches)


class DeviceWait:
    """Tells whether the device has been in one call since the last time it was asked."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        captures: Captures,
        executing: Callable[[], FrozenSet[Tuple[str, str, str]]] = flight.executing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
        self._captures = captures
        self._executing = executing
        self._clock = clock
        self._progress = -1
        self._asked = 0.0
        self._found: FrozenSet[Tuple[str, str, str]] = frozenset()
        self._waits = False

    def look(self) -> bool:
        progress, now = self._heartbeat.progress, self._clock()
        if progress != self._progress:
            self._progress, self._asked, self._found, self._waits = (
                progress,
                now,
                frozenset(),
                False,
            )
        elif now - self._asked >= _ASK:
            before, self._asked, self._found = self._found, now, frozenset()
            with self._captures.question() as allowed:
                if allowed and torch.cuda.is_initialized():
                    self._found = self._executing()
            self._waits = bool(before & self._found)
        return self._waits


def asleep(thread: int, proc: str = "/proc/self/task") -> Optional[Tuple[str, ...]]:
    """The counts of switches from and to a sleeping thread of this process. None if it does not
    sleep, or if this system does not count."""
    try:
        text = Path(f"{proc}/{thread}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(line.partition(":")[::2] for line in text.splitlines())
    counts = tuple(fields.get(name, "").strip() for name in _SWITCHES)
    return counts if all(counts) and fields.get("State", "").strip()[:1] == "S" else None
