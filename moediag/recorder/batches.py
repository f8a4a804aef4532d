"""Counts the batches that torch's data loaders give: a rank whose loader ends earlier than those of
the others makes fewer collectives. An event is written when a loader ends, and when the rank ends
or is examined for the loader in use."""

from __future__ import annotations

import weakref
from typing import Any, Optional

from moediag.recorder.core import ByObject, Recorder


class Batches:
    """Follows the iterators of data loaders."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._latest: Optional[weakref.ref[Any]] = None  # the iterator that gave the last batch
        self._lines = ByObject()  # iterator -> the user's line that asked for its first batch

    def install(self) -> None:
        self._recorder.on_batch.append(self._given)
        self._recorder.on_pass_end.append(self._ended)
        self._recorder.on_capture.append(self._tell)
        self._recorder.on_end.append(self._tell)

    def _given(self, iterator: Any, frame: Any) -> None:
        self._recorder.heartbeat.turn()
        latest = self._latest
        if latest is not None and latest() is iterator:
            return
        self._latest = weakref.ref(iterator)
        if self._lines.get(iterator) is None:
            self._lines.set(iterator, self._recorder.user_lines.innermost(frame))

    def _ended(self, iterator: Any, frame: Any) -> None:
        line = self._lines.get(iterator) or self._recorder.user_lines.innermost(frame)
        self._latest = None
        self._recorder.event("batches", line=line, number=iterator._num_yielded, ended=True)

    def _tell(self) -> None:
        """Writes no heartbeat: the rank itself makes no progress."""
        iterator = self._latest() if self._latest is not None else None
        if iterator is not None:
            line, number = self._lines.get(iterator), iterator._num_yielded
            self._recorder.log.event("batches", line=line or "", number=number, ended=False)
