"""Laws in a transformers ``Trainer``, and in what builds on it, such as TRL."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback

from moediag.callbacks.job_laws import JobLaws
from moediag.callbacks.sinks import Sink

__all__ = ["TrainerLaws"]


class TrainerLaws(TrainerCallback):
    """Checks the laws of healthy training in each ``train()`` of a Trainer.

    Give it to the Trainer's constructor, so that it sees how the model is wrapped. ``folder``,
    ``every``: as of :func:`moediag.laws.record`. ``sinks``: where findings go besides the logger
    ``moediag``.
    """

    def __init__(self, folder: str = "laws-run", every: int = 0, sinks: Sequence[Sink] = ()):
        """As :class:`moediag.callbacks.job_laws.JobLaws`."""
        self._laws = JobLaws(folder, every, sinks)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _calling_trainer()
        if trainer is not None:
            self._laws.begin(trainer)
            trainer.train = self._ending(trainer.train)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._laws.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._laws.end()

    def _ending(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """``train``, which ends the record also by an exception: a Trainer tells no callback."""

        @functools.wraps(train)
        def trains(*args: Any, **more: Any) -> Any:
            try:
                done = train(*args, **more)
            except BaseException as error:
                self._laws.end(error)
                raise
            self._laws.end()
            return done

        return trains


def _calling_trainer() -> Any:
    """The Trainer whose constructor calls, None if the caller is another one."""
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]
