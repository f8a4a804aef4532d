"""Laws in a Lightning ``Trainer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # its older name

from moediag.callbacks.job_laws import JobLaws
from moediag.callbacks.sinks import Sink

__all__ = ["LightningLaws"]


class LightningLaws(Callback):
    """Checks the laws of healthy training in the first ``fit()`` of a Trainer. Its arguments are
    those of :class:`moediag.callbacks.trainer_callback.TrainerLaws`."""

    def __init__(self, folder: str = "laws-run", every: int = 0, sinks: Sequence[Sink] = ()):
        """As :class:`moediag.callbacks.job_laws.JobLaws`."""
        super().__init__()
        self._laws = JobLaws(folder, every, sinks)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # the process group exists, and the model is not wrapped yet
            self._laws.begin()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._laws.backward(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._laws.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._laws.end(exception)
