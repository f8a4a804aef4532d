"""Laws in a transformers ``Trainer``, and in what builds on it, such as TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from moediag.callbacks.job_laws import JobLaws
from moediag.callbacks.sinks import Sink

__all__ = ["TrainerLaws"]


class TrainerLaws(TrainerCallback):
    """Checks the laws of healthy training in the first ``train()`` of a Trainer.

    Give it to the Trainer's constructor, so that it sees how the model is wrapped.
    """

    def __init__(self, folder: str = "laws-run", every: int = 0, sinks: Sequence[Sink] = ()):
        """As :class:`moediag.callbacks.job_laws.JobLaws`."""
        self._laws = JobLaws(folder, every, sinks)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        self._laws.begin()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._laws.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._laws.end()
