"""Knows the scale by which a GradScaler multiplied the loss of the step that is about to be made,
and whether the gradients still have it.

A step that a scaler skips counts as a step: the ranks whose gradients were finite made it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Dict, Iterable

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.parameter_names import parameters_of

NAME = "loss_scale"  # among the numbers of the optimizer


class LossScale:
    """The scaler whose ``step`` runs."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._running: Any = None
        self._scalers = ByObject()  # optimizer -> weak reference to the scaler that makes its steps
        from torch.amp import grad_scaler

        self._context.recorder.patches.replace(grad_scaler.GradScaler, "step", self._wrapped)

    def of(self, optimizer: Any) -> Dict[str, str]:
        """The scale as a number of ``optimizer``, which is about to step; empty without a
        scaler."""
        scaler = self._running
        if scaler is None or not scaler.is_enabled():
            return {}
        return {NAME: repr(float(scaler.get_scale()))}

    def still_in(self, parameters: Iterable[Any]) -> float:
        """The scale by which the gradients of ``parameters`` are still multiplied; 0.0 if they are
        not, or that is not known: in the first step no scaler has made a step."""
        ids = set(map(id, parameters))
        for optimizer in self._scalers.owners():
            scaler = self._scalers.get(optimizer)()
            if scaler is None or not scaler.is_enabled():
                continue
            if not ids.isdisjoint(map(id, parameters_of(optimizer))):
                state = scaler._per_optimizer_states.get(id(optimizer))
                ready = state is None or state["stage"].name == "READY"
                return float(scaler.get_scale()) if ready else 0.0
        return 0.0

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._running = self._running, scaler
            self._context.guarded(
                "laws of norms", self._scalers.set, optimizer, weakref.ref(scaler)
            )
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._running = before
                if self._context.recorder.active:
                    self._context.recorder.stepped = True

        return step
