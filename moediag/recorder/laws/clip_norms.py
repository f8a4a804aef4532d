"""Records, at checked steps, the norm by which torch.nn.utils scales gradients, and whether a
GradScaler has yet to divide them by the loss scale."""

from __future__ import annotations

from typing import Any, List

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of norms"


def install(context: LawContext, scale: LossScale) -> None:
    recorder = context.recorder

    def record(parameters: List[Any], max_norm: float, norm: Any, frame: Any) -> None:
        if hasattr(norm, "placements"):
            return
        known = context.names.of(parameters)
        if not known or None in known:
            return
        context.log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(float(norm)),
            max_norm=float(max_norm), line=recorder.user_lines.innermost(frame),
            scale=scale.still_in(parameters),
        )  # fmt: skip

    def before(*given: Any) -> None:
        if context.checking and not capturing():
            context.guarded(WATCHER, record, *given)

    if not recorder.hooks.before_clipping(before):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
