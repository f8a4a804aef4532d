"""Records, at checked steps, the norm by which torch.nn.utils or DeepSpeed scales gradients, and
whether a GradScaler has yet to divide them by the loss scale."""

from __future__ import annotations

from typing import Any, List, Optional

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.cleared_gradients import mark
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.step.hooks import clipping
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of norms"
_DEEPSPEED = "deepspeed.runtime.engine"


def install(context: LawContext, scale: LossScale) -> None:
    recorder = context.recorder
    updated = ByObject()  # optimizer -> a gradient that its last update used

    def remember(optimizer: Any) -> None:
        if context.checking:
            updated.set(optimizer, mark(optimizer))

    def used(parameters: List[Any]) -> bool:
        """Whether an update used the gradients, and nothing has added to them since."""
        ids = set(map(id, parameters))
        marks = filter(None, (updated.get(optimizer) for optimizer in updated.owners()))
        return any(id(p) in ids and p.grad is g and g._version == v for p, g, v in marks)

    def record(
        parameters: List[Any], max_norm: float, norm: Any, frame: Any, squares: Any = None
    ) -> None:
        known = context.names.of(parameters)
        if hasattr(norm, "placements") or not known or None in known:
            return
        context.log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(float(norm)),
            max_norm=float(max_norm), line=recorder.user_lines.innermost(frame),
            scale=scale.still_in(parameters),
            squares=None if squares is None else squares.tolist(), late=used(parameters),
        )  # fmt: skip

    def before(*given: Any) -> None:
        if context.checking and not capturing():
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

    recorder.hooks.after_step(lambda optimizer: context.guarded(WATCHER, remember, optimizer))
    if not recorder.hooks.before_clipping(before):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
    context.replace_late(_DEEPSPEED, "", "clip_grad_norm_", clipping(measured, after))
