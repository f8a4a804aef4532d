"""Counts the batches that torch's data loaders give: a rank whose loader ends earlier than those of
the others makes fewer collectives. An event is written when a loader ends, and when the rank ends
or is examined for the loader in use."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Optional

from moediag.recorder.core import ByObject, Recorder


class Batches:
    """Watches the iterators of data loaders."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._latest: Optional[weakref.ref[Any]] = None  # the iterator that gave the last batch
        self._lines = ByObject()  # iterator -> the user's line that asked for its first batch

    def install(self) -> None:
        """Raises AttributeError or ImportError where torch has no such loader."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._recorder.patches.replace(_BaseDataLoaderIter, "__next__", self._counted)
        self._recorder.on_capture.append(self._tell)
        self._recorder.on_end.append(self._tell)

    def _counted(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                self._guarded(self._ended, iterator)
                raise
            latest = self._latest
            if latest is None or latest() is not iterator:
                self._guarded(self._used, iterator)
            return batch

        return __next__

    def _guarded(self, act: Callable[[Any], None], iterator: Any) -> None:
        if self._recorder.active:
            try:
                act(iterator)
            except Exception as error:
                self._recorder.fault("batches", error)

    def _used(self, iterator: Any) -> None:
        self._latest = weakref.ref(iterator)
        if self._lines.get(iterator) is None:
            self._lines.set(iterator, self._recorder.user_lines.innermost(sys._getframe(3)))

    def _ended(self, iterator: Any) -> None:
        line = self._lines.get(iterator) or self._recorder.user_lines.innermost(sys._getframe(3))
        self._latest = None
        self._recorder.event("batches", line=line, number=iterator._num_yielded, ended=True)

    def _tell(self) -> None:
        """Writes no heartbeat: the rank itself makes no progress."""
        iterator = self._latest() if self._latest is not None else None
        if iterator is not None:
            line, number = self._lines.get(iterator), iterator._num_yielded
            self._recorder.log.event("batches", line=line or "", number=number, ended=False)
