"""Knows the scale by which a GradScaler multiplied the loss of the step that is about to be made.

A step that a scaler skips counts as a step: the ranks whose gradients were finite made it.
"""

from __future__ import annotations

import functools
from typing import Any, Dict

from moediag.recorder.laws.context import LawContext

NAME = "loss_scale"  # among the numbers of the optimizer


class LossScale:
    """The scaler whose ``step`` runs."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._running: Any = None

    def install(self) -> None:
        from torch.amp import grad_scaler

        self._context.recorder.patches.replace(grad_scaler.GradScaler, "step", self._wrapped)

    def of(self, optimizer: Any) -> Dict[str, str]:
        """The scale as a number of ``optimizer``, which is about to step; empty without a
        scaler."""
        scaler = self._running
        if scaler is None or not scaler.is_enabled():
            return {}
        return {NAME: repr(float(scaler.get_scale()))}

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._running = self._running, scaler
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self._running = before
                if self._context.recorder.active:
                    self._context.recorder.stepped = True

        return step
