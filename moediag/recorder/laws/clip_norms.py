"""Records, at checked steps, the norm by which torch.nn.utils or DeepSpeed scales gradients, and
whether a GradScaler has yet to divide them by the loss scale."""

from __future__ import annotations

import sys
from typing import Any, List, Optional

import torch

from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of norms"
_DEEPSPEED = "deepspeed.runtime.engine"


def install(context: LawContext, scale: LossScale) -> None:
    recorder = context.recorder

    def record(
        parameters: List[Any], max_norm: float, norm: Any, frame: Any, squares: Any = None
    ) -> None:
        if hasattr(norm, "placements"):
            return
        known = context.names.of(parameters)
        if not known or None in known:
            return
        context.log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(float(norm)),
            max_norm=float(max_norm), line=recorder.user_lines.innermost(frame),
            scale=scale.still_in(parameters),
            squares=None if squares is None else squares.tolist(),
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

    def of_deepspeed() -> None:
        recorder.hooks.around_clipping_of(
            sys.modules[_DEEPSPEED],
            measured,
            lambda found, max_norm, norm, frame: context.guarded(
                WATCHER, record, found[0], max_norm, norm, frame, found[1]
            ),
        )

    if not recorder.hooks.before_clipping(before):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
    recorder.on_uninstall.append(when_imported(_DEEPSPEED, of_deepspeed))
