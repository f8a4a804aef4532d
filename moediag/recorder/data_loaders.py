"""One hook on torch's data loaders, for every watcher of batches, and the watcher that counts them:
a rank whose loader ends earlier than those of the others makes fewer collectives. An event is
written when a loader ends, and when the rank ends or is examined for the loader in use."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, List, Optional

from moediag.recorder.core import ByObject, Recorder


def install(recorder: Recorder) -> None:
    """Calls ``recorder.on_pass``, ``on_batch`` and ``on_pass_end`` from now on.

    Raises AttributeError or ImportError where torch has no such loader."""
    from torch.utils.data import dataloader

    def passes(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:
            iterator = original(loader)
            _tell(recorder, recorder.on_pass, loader, iterator)
            return iterator

        return __iter__

    def batches(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                _tell(recorder, recorder.on_pass_end, iterator, sys._getframe(1))
                raise
            _tell(recorder, recorder.on_batch, iterator, sys._getframe(1), batch)
            return batch

        return __next__

    if recorder.on_pass:
        recorder.patches.replace(dataloader.DataLoader, "__iter__", passes)
    recorder.patches.replace(dataloader._BaseDataLoaderIter, "__next__", batches)


def _tell(recorder: Recorder, listeners: List[Callable[..., None]], *what: Any) -> None:
    if recorder.active:
        for listener in listeners:
            try:
                listener(*what)
            except Exception as error:
                recorder.fault("batches", error)


class Batches:
    """Follows the iterators of data loaders."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._latest: Optional[weakref.ref[Any]] = None  # the iterator that gave the last batch
        self._lines = ByObject()  # iterator -> the user's line that asked for its first batch
        self._last = ("", 0)  # the line and the number of batches of ``_latest``

    def install(self) -> None:
        self._recorder.on_batch.append(self._given)
        self._recorder.on_pass_end.append(self._ended)
        self._recorder.on_capture.append(self._tell)
        self._recorder.on_end.append(self._tell)
        self._recorder.on_error.append(self._tell_last)

    def _given(self, iterator: Any, frame: Any, _batch: Any) -> None:
        self._recorder.heartbeat.turn()
        latest = self._latest
        if latest is None or latest() is not iterator:
            self._latest = weakref.ref(iterator)
            if self._lines.get(iterator) is None:
                self._lines.set(iterator, self._recorder.user_lines.innermost(frame))
        self._last = self._lines.get(iterator), iterator._num_yielded

    def _ended(self, iterator: Any, frame: Any) -> None:
        line = self._lines.get(iterator) or self._recorder.user_lines.innermost(frame)
        self._latest = None
        self._recorder.event("batches", line=line, number=iterator._num_yielded, ended=True)

    def _tell(self) -> None:
        """Writes no heartbeat: the rank itself makes no progress."""
        iterator = self._latest() if self._latest is not None else None
        if iterator is not None:
            self._write(self._lines.get(iterator) or "", iterator._num_yielded)

    def _tell_last(self) -> None:
        """An exception that leaves the loop over a loader also ends its iterator."""
        if self._latest is not None:
            self._write(*self._last)

    def _write(self, line: str, number: int) -> None:
        self._recorder.log.event("batches", line=line, number=number, ended=False)
