"""One hook on torch's data loaders, for every watcher that follows batches."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, List

from moediag.recorder.core import Recorder


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
            _tell(recorder, recorder.on_batch, iterator, sys._getframe(1))
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
