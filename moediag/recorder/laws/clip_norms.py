"""Records, at checked steps, the norm by which torch's ``clip_grad_norm_`` scales gradients, and
whether a GradScaler has yet to divide them by the loss scale."""

from __future__ import annotations

import functools
import sys
from typing import Any, List

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of norms"


def install(context: LawContext, scale: LossScale) -> None:
    """Wraps the function that clip_grad_norm_ looks up when it is called: programs that imported
    clip_grad_norm_ itself before are seen, too."""
    from torch.nn.utils import clip_grad

    recorder = context.recorder

    def record(parameters: List[Any], max_norm: float, norm: Any, frame: Any) -> None:
        if not isinstance(parameters, list) or hasattr(norm, "placements"):
            return
        known = context.names.of(parameters)
        if not known or None in known:
            return
        context.log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(float(norm)),
            max_norm=float(max_norm), line=recorder.user_lines.innermost(frame),
            scale=scale.still_in(parameters),
        )  # fmt: skip

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, norm: Any, *more: Any, **options: Any) -> Any:
            if context.checking and not capturing():
                context.guarded(WATCHER, record, parameters, max_norm, norm, sys._getframe(1))
            return original(parameters, max_norm, norm, *more, **options)

        return clip

    if not recorder.patches.replace(clip_grad, "_clip_grads_with_norm_", make):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
