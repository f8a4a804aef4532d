"""When is an operation done? When the rank waited for it and the data is there.

On a CPU backend a returned ``wait()`` says so. On an accelerator ``wait()`` only orders streams:
there an event is recorded behind it and asked later, never with a synchronisation of our own. The
rank asks when it issues its next operation, the recorder's own thread when the rank has come to a
stop: a rank that stands in ``.item()`` issues nothing more.

That the device *began* an operation is not asked here: an event before the call, on the stream of
the caller, would only tell that its inputs were ready. torch's own Flight Recorder has the events
around the kernel, see :mod:`moediag.recorder.flight`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any, Deque, Dict, NamedTuple, Optional, Tuple

import torch

from moediag.recorder.calls import Call
from moediag.recorder.capturing import Captures
from moediag.recorder.core import Recorder

SETTLE = 0.5  # seconds
_MAX_EXPECTED = 1024  # works that nobody waited for, yet
_MAX_NATIVE = 64  # a Work keeps its tensors: hold few


class Expected(NamedTuple):
    """Operations that one Work object stands for."""

    numbers: Tuple[int, ...]
    work: Any  # weak reference: keeping a Work alive would keep its tensors
    device: bool


class Completion:
    """Maps Work objects and output tensors to the operations they complete."""

    def __init__(self, recorder: Recorder, captures: Optional[Captures] = None) -> None:
        self._recorder = recorder
        self._captures = captures if captures is not None else Captures()
        self._works: Dict[int, Expected] = {}
        self._tensors: Dict[int, int] = {}  # storage -> operation, for wait_tensor
        self._native: Dict[int, Any] = {}  # issued from C++: operation -> Work, None if unknown
        self._device: Deque[Tuple[int, Any]] = deque()  # (operation, accelerator event)

    # -------------------------------------------------------------------- Python's Work objects

    def expect(self, work: Any, numbers: Tuple[int, ...], device: bool) -> None:
        if len(self._works) >= _MAX_EXPECTED:
            for key in [k for k, e in self._works.items() if e.work() is None]:
                self._works.pop(key, None)
            while len(self._works) >= _MAX_EXPECTED:
                self._works.pop(next(iter(self._works)))
        self._works[id(work)] = Expected(numbers, weakref.ref(work), device)

    def of_work(self, work: Any) -> Optional[Expected]:
        expected = self._works.get(id(work))
        return expected if expected is not None and expected.work() is work else None

    def waited(self, work: Any, expected: Expected) -> None:
        if self._works.pop(id(work), None) is not None:
            for number in expected.numbers:
                self._completed(number, expected.device)

    # -------------------------------------------------------------------- issued from C++

    def expect_native(self, work: Any, number: int, call: Call) -> None:
        """``work``: the operator's boxed Work. Completed when ``wait_tensor`` returns for one of
        the outputs, or, for DDP's reducer, when the Work says so the next time we look."""
        for tensor in call.tensors:
            self._tensors[tensor.untyped_storage()._cdata] = number
        while len(self._tensors) > _MAX_EXPECTED:
            self._tensors.pop(next(iter(self._tensors)))
        try:
            self._native[number] = torch.distributed.Work.unbox(work)
        except (AttributeError, RuntimeError, TypeError):
            self._native[number] = None
            self._recorder.note_not_seen(
                "when collectives issued from C++ (DDP) completed: this torch does not say"
            )
        while len(self._native) > _MAX_NATIVE:
            self._native.pop(next(iter(self._native)))

    def of_tensor(self, tensor: Any) -> Optional[int]:
        try:
            return self._tensors.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # subclasses without storage
            return None

    def tensor_waited(self, number: int) -> None:
        for key in [k for k, n in self._tensors.items() if n == number]:
            del self._tensors[key]
        if number in self._native:  # else it was seen to complete before it was waited for
            del self._native[number]
            self._completed(number, True)

    # -------------------------------------------------------------------- accelerator

    def _completed(self, number: int, device: bool) -> None:
        if not device or not torch.cuda.is_initialized():
            self._recorder.done(number)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a graph replays it; what completes then is not this call
        event = torch.cuda.Event()
        event.record()
        self._device.append((number, event))

    def settle(self, seconds: float = SETTLE) -> None:
        """At the rank's end: what nobody waits for, the flags of DDP's reducer for one, is mostly
        done a moment later. Looks again for ``seconds`` at most."""
        until = time.monotonic() + seconds
        while any(work is not None for work in self._native.values()):
            self.poll()
            if time.monotonic() > until:
                return
            time.sleep(0.002)

    def poll(self) -> None:
        """Writes ``done`` for what has completed meanwhile; cheap when nothing is pending. For the
        rank's own threads; see :meth:`look` for others."""
        if not self._device and not self._native:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._ask()

    def look(self) -> None:
        """The same from another thread, of a rank that came to a stop, and of what it has not
        waited for yet as well. Never initialises an accelerator, and leaves a capture alone."""
        if self._device or self._native or any(e.device for e in list(self._works.values())):
            self._ask(works=True)

    def _ask(self, works: bool = False) -> None:
        """One thread at a time; the other one's question is as good, so nobody waits."""
        asking = self._captures.asking
        if not asking.acquire(blocking=False):
            return
        try:
            # Looked at under the lock: a capture counts itself before it waits for the lock.
            if self._captures.running:
                return
            while self._device and self._device[0][1].query():
                self._recorder.done(self._device.popleft()[0])
            for number, work in list(self._native.items()):
                if work is None or not work.is_completed():
                    continue
                if self._native.pop(number, None) is not None:
                    self._recorder.done(number)
            for key, expected in list(self._works.items()) if works else ():
                work = expected.work() if expected.device else None
                if work is None or not _succeeded(work):
                    continue
                if self._works.pop(key, None) is not None:  # else the rank waited just now
                    for number in expected.numbers:
                        self._recorder.done(number)
        finally:
            asking.release()


def _succeeded(work: Any) -> bool:
    """Completed, and not because the library gave up on it."""
    return bool(work.is_completed()) and work.exception() is None
