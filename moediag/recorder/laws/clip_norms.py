"""Records, at checked steps, the norm by which torch.nn.utils or DeepSpeed scales gradients,
whether a GradScaler has yet to divide them by the loss scale, and which calls a backward followed.

unclipped   step(of the call) line   the call clipped gradients or found none, a backward added to
            all gradients of its parameters, and the update used them
"""

from __future__ import annotations

import math
from typing import Any, List, Optional

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.hooks import clipping
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import GradientMark

WATCHER = "laws of norms"
_DEEPSPEED = "deepspeed.runtime.engine"


class _Call:
    """A call that clipped, or found no gradients, until the update of its parameters."""

    def __init__(self, parameters: List[Any], step: int, line: str) -> None:
        self.parameters, self.step, self.line = parameters, step, line
        self.left = parameters  # those to whose gradients no backward added since
        self.before: List[GradientMark] = []  # of each of them, before a backward
        self.unclipped = False  # a backward added to all gradients that there are

    def begin(self) -> None:
        self.before = list(map(GradientMark, self.left))

    def end(self) -> None:
        if self.before:  # else the call was made in this backward
            self.left = [mark.parameter for mark in self.before if mark.unchanged()]
            self.before = []
            added = len(self.left) < len(self.parameters)
            self.unclipped = added and all(p.grad is None for p in self.left)


def install(context: LawContext, scale: LossScale) -> None:
    recorder = context.recorder
    waiting: List[_Call] = []

    def take(parameters: List[Any]) -> List[_Call]:
        ids = set(map(id, parameters))
        found = [call for call in waiting if any(id(p) in ids for p in call.parameters)]
        waiting[:] = [call for call in waiting if call not in found]
        return found

    def before_backward(_loss: Any) -> None:
        # Those before updates without an optimizer of torch are not kept.
        waiting[:] = [call for call in waiting if call.step >= context.step - 1]
        for call in waiting:
            call.begin()

    def after_backward() -> None:
        for call in waiting:
            call.end()

    def updated(optimizer: Any) -> None:
        for call in take(parameters_of(optimizer)):
            if call.unclipped:
                context.event("unclipped", step=call.step, line=call.line)

    def record(
        parameters: List[Any], max_norm: float, norm: Any, frame: Any, squares: Any = None
    ) -> None:
        take(parameters)
        known = context.names.of(parameters) if context.checking else []
        if hasattr(norm, "placements") or not known or None in known:
            return
        line, number = context.line(frame), float(norm)
        if math.isfinite(max_norm) and not 0 < number <= max_norm:  # else it may only measure
            waiting.append(_Call(parameters, context.step, line))
        context.event(
            "norm", names=known, norm=repr(number), max_norm=float(max_norm), line=line,
            scale=scale.still_in(parameters),
            squares=None if squares is None else squares.tolist(),
        )  # fmt: skip

    def before(*given: Any) -> None:
        if (context.checking or waiting) and not capturing():
            context.guarded(WATCHER, record, *given)

    def measure(parameters: Any, measured: List[Any]) -> None:
        own = [parameter for parameter in parameters if parameter.grad is not None]
        norms = torch.stack([p.grad.norm(dtype=torch.float32) for p in own])
        measured += own, norms.double().square()

    def measured(parameters: Any) -> Optional[List[Any]]:
        found: List[Any] = []
        if context.checking:
            context.guarded(WATCHER, measure, parameters, found)
        return found or None

    def after(found: Any, *given: Any) -> None:
        context.guarded(WATCHER, record, found[0], *given, found[1])

    context.after_step.add(WATCHER, updated, pending=waiting)
    context.before_backward.add(WATCHER, before_backward, pending=waiting)
    context.after_backward.add(WATCHER, after_backward, pending=waiting)
    if not recorder.hooks.before_clipping(before):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
    context.replace_late(_DEEPSPEED, "", "clip_grad_norm_", clipping(measured, after))
