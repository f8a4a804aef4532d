"""Knows the scale by which a GradScaler multiplied the loss of the step that is about to be made,
and whether the gradients still have it. Records updates whose gradients do.

A step that a scaler skips counts as a step: the ranks whose gradients were finite made it.

undivided   step scale line(of an update without the scaler, of gradients of scaled losses only,
            whose norms nothing changed after the backward)
"""

from __future__ import annotations

import functools
import math
import weakref
from itertools import islice
from typing import Any, Dict, Iterable, Optional

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.pieces import local

NAME = "loss_scale"  # among the numbers of the optimizer
_WATCHER = "laws of scales"
_MOST_GRADIENTS = 8  # that are followed until the update


class LossScale:
    """The scaler whose ``step`` runs."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._running: Any = None
        self._scalers = ByObject()  # optimizer -> weak reference to the scaler that makes its steps
        self._made = ByObject()  # scaler -> True
        self._scaled: Optional[float] = None  # by which all losses since the update were; 0.0: not
        self._norms: Dict[int, float] = {}  # id of a parameter -> norm of its gradient
        from torch.amp import grad_scaler

        making = context.around(_WATCHER, lambda scaler, _: self._made.set(scaler, True))
        context.recorder.patches.replace(grad_scaler.GradScaler, "__init__", making)
        context.recorder.patches.replace(grad_scaler.GradScaler, "step", self._wrapped)
        context.before_backward.add(_WATCHER, self._scales, checked=True)
        context.after_backward.add(_WATCHER, self._follow, checked=True)
        context.before_step.add(_WATCHER, self._updates, checked=True)

    def _scales(self, loss: Any) -> None:
        """Whether a scaler returned the loss: it is a product with the tensor of its scale."""
        by: Any = getattr(getattr(loss, "grad_fn", None), "_saved_other", None)
        place = by.data_ptr() if torch.is_tensor(by) else 0
        made = [s._scale for s in self._made.owners() if getattr(s, "_scale", None) is not None]
        scale = next((float(one) for one in made if one.data_ptr() == place), 0.0)
        self._scaled = 0.0 if self._scaled == 0.0 else scale

    def _follow(self) -> None:
        models = self._context.models() if self._scaled else ()
        every = (p for model in models for p in model.parameters if p.grad is not None)
        plain = (p for p in every if not p._backward_hooks)  # these may divide
        self._norms = {id(p): _norm(p) for p in islice(plain, _MOST_GRADIENTS)}

    def _updates(self, optimizer: Any, closure: bool, frame: Any) -> None:
        scale, norms, self._scaled, self._norms = self._scaled or 1.0, self._norms, None, {}
        own = [(norms[id(p)], _norm(p)) for p in parameters_of(optimizer) if id(p) in norms]
        kept = any(before for before, _ in own) and all(before == now for before, now in own)
        hidden = self._running is not None or closure or self._context.sets.hooked()
        if kept and scale != 1.0 and not hidden:
            self._context.event("undivided", scale=scale, line=self._context.line(frame))

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


def _norm(parameter: Any) -> float:
    """Of the local gradient; 0.0 without one, or if it is not finite."""
    norm = 0.0 if parameter.grad is None else float(local(parameter.grad).detach().float().norm())
    return norm if math.isfinite(norm) else 0.0
