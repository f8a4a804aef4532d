"""Detects that a thread of the rank waits, in C++, for a call that C++ issued.

The recorder's wrappers see the waits of Python. DDP's reducer issues its calls from C++ and waits
for them there: the innermost Python frame is autograd's, which is also the frame of a backward that
computes. So the wait is proven by three facts together: a call of this thread is open, its
innermost Python frame is one below which torch waits for communication, and the thread slept from
one look to the next without a switch to it. To be seen asleep twice is not enough: a thread that
executes Python sleeps during each look, for the interpreter's lock that the look holds, and on a
busy machine it may get no CPU time in between.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch

from moediag.recorder.completion import Completion
from moediag.recorder.heartbeat import HeartbeatWriter

_TORCH = str(Path(torch.__file__).parent)
# Innermost Python frames of torch below which C++ waits for communication: the engine's callbacks,
# DDP's broadcast of buffers, and everything in torch.distributed.
_ENGINE = (f"{_TORCH}/autograd/graph.py", f"{_TORCH}/autograd/__init__.py")
_PLACES = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/distributed.py", *_ENGINE)

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
    ) -> None:
        self._heartbeat = heartbeat
        self._completion = completion
        self._frames = frames
        self._state = state or asleep
        self._before: Optional[Look] = None

    def look(self) -> None:
        now = self._look()
        waits = now is not None and now == self._before
        self._before = now
        self._heartbeat.assume(now.call if now is not None and waits else -1)

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
