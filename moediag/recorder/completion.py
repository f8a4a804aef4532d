"""Detects when an operation is done: the rank waited for it and the data is there.

On a CPU backend, ``wait()`` returns when the data is there. On an accelerator, ``wait()`` only
orders streams: an event is recorded after it and queried later, without extra synchronisation. The
rank queries it when it issues its next operation. Once the rank has stopped, for example in
``.item()``, it issues nothing more, and the recorder's thread queries instead.

This module does not detect when the device *started* an operation: an event before the call, on
the caller's stream, would only show that its inputs were ready. torch's Flight Recorder has the
events around the kernel, see :mod:`moediag.recorder.flight`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import Any, Deque, Dict, NamedTuple, Optional, Tuple

import torch

from moediag.recorder.calls import Call
from moediag.recorder.capturing import Captures
from moediag.recorder.core import Recorder

SETTLE = 0.5  # seconds
_MAX_EXPECTED = 1024  # Work objects not waited for yet
_MAX_NATIVE = 64  # a Work keeps its tensors: hold few


class Expected(NamedTuple):
    """The operations of one Work object."""

    numbers: Tuple[int, ...]
    work: Any  # weak reference: keeping a Work alive would keep its tensors
    device: bool


class Thread(NamedTuple):
    """A thread of this process."""

    ident: int  # as in threading
    native: int  # as in /proc

    @classmethod
    def current(cls) -> "Thread":
        return cls(threading.get_ident(), threading.get_native_id())


class Native(NamedTuple):
    """An operation issued from C++."""

    work: Any  # None: this torch does not give it
    host: bool  # its data are in the host's memory, so a wait blocks the thread
    thread: Thread  # that issued it


class Completion:
    """Maps Work objects and output tensors to the operations they complete."""

    def __init__(self, recorder: Recorder, captures: Optional[Captures] = None) -> None:
        self._recorder = recorder
        self._captures = captures if captures is not None else Captures()
        self._works: Dict[int, Expected] = {}
        self._tensors: Dict[int, int] = {}  # storage -> operation, for wait_tensor
        self._native: Dict[int, Native] = {}  # issued from C++, by operation
        self._device: Deque[Tuple[int, Any]] = deque()  # (operation, accelerator event)
        self._at_end = False

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

    def failed(self, work: Any, expected: Expected, error: BaseException) -> None:
        """Records that waiting for ``work`` raised ``error``, which the program may swallow."""
        if self._works.pop(id(work), None) is not None:
            for number in expected.numbers:
                self._recorder.failed(number, error)

    # -------------------------------------------------------------------- issued from C++

    def expect_native(self, work: Any, number: int, call: Call) -> None:
        """Expects an operation issued from C++; ``work`` is the operator's boxed Work. It completes
        when ``wait_tensor`` returns for an output or, for DDP's reducer, when a poll of the Work
        says so."""
        for tensor in call.tensors:
            self._tensors[tensor.untyped_storage()._cdata] = number
        while len(self._tensors) > _MAX_EXPECTED:
            self._tensors.pop(next(iter(self._tensors)))
        known = None
        try:
            known = torch.distributed.Work.unbox(work)
        except (AttributeError, RuntimeError, TypeError):
            self._recorder.note_not_seen(
                "when collectives issued from C++ (DDP) completed: this torch does not say"
            )
        self._native[number] = Native(known, not call.device, Thread.current())
        while len(self._native) > _MAX_NATIVE:
            self._native.pop(next(iter(self._native)))

    def oldest_open(self) -> Optional[Tuple[int, Thread]]:
        """The oldest open operation whose wait would block the thread that issued it."""
        known = [(n, x.thread) for n, x in list(self._native.items()) if x.host and x.work]
        return min(known, default=None)

    def of_tensor(self, tensor: Any) -> Optional[int]:
        try:
            return self._tensors.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # subclasses without storage
            return None

    def tensor_waited(self, number: int) -> None:
        for key in [k for k, n in self._tensors.items() if n == number]:
            del self._tensors[key]
        if number in self._native:  # else a poll already found it completed
            del self._native[number]
            self._completed(number, True)

    # -------------------------------------------------------------------- accelerator

    def _completed(self, number: int, device: bool) -> None:
        if not device or not torch.cuda.is_initialized():
            self._recorder.done(number)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # graph replays run the operation, not this call
        event = torch.cuda.Event()
        event.record()
        self._device.append((number, event))

    def settle(self, seconds: float = SETTLE) -> None:
        """Polls for up to ``seconds`` at the rank's end: operations that it never waits for, such
        as the flags of DDP's reducer, usually complete a moment later. Or they fail because a peer
        has ended as well: that is no failure of the job, so it is left open."""
        until = time.monotonic() + seconds
        self._at_end = True
        while any(found.work is not None for found in self._native.values()):
            self.poll()
            if time.monotonic() > until:
                return
            time.sleep(0.002)

    def poll(self) -> None:
        """Writes ``done`` for completed operations; cheap when nothing is pending. Only the rank's
        threads may call it; see :meth:`look` for others."""
        if not self._device and not self._native:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._ask()

    def look(self) -> None:
        """Like :meth:`poll`, from another thread once the rank has stopped; also checks operations
        not waited for yet. Never initialises an accelerator or disturbs a capture."""
        if self._device or self._native or any(e.device for e in list(self._works.values())):
            self._ask(works=True)

    def _ask(self, works: bool = False) -> None:
        """Queries the device, unless another thread is doing it: its query has the same result."""
        with self._captures.question() as allowed:
            if not allowed:
                return
            while self._device and self._device[0][1].query():
                self._recorder.done(self._device.popleft()[0])
            for number, found in list(self._native.items()):
                if found.work is None or not found.work.is_completed():
                    continue
                error = _error(found.work) if found.host else None
                if self._native.pop(number, None) is None:
                    continue
                if error is None:
                    self._recorder.done(number)
                elif not self._at_end:
                    self._recorder.failed(number, error)
            for key, expected in list(self._works.items()) if works else ():
                work = expected.work() if expected.device else None
                if work is None or not _succeeded(work):
                    continue
                if self._works.pop(key, None) is not None:  # else the rank has just waited
                    for number in expected.numbers:
                        self._recorder.done(number)


def _succeeded(work: Any) -> bool:
    """Whether ``work`` completed without an error."""
    return bool(work.is_completed()) and work.exception() is None


def _error(work: Any) -> Optional[BaseException]:
    """The error of a completed Work on the CPU. Such a Work also counts as completed when its
    connection broke. Its ``wait`` returns at once; ``exception`` and ``is_success`` are deprecated
    and would print that into the job's output."""
    try:
        work.wait()
    except Exception as error:
        return error
    return None
