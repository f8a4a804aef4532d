"""Records, at checked steps, the norm by which torch's ``clip_grad_norm_`` scales gradients."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, List

import torch

from moediag.recorder.core import Recorder
from moediag.recorder.log import EventLog
from moediag.recorder.parameter_names import ParameterNames

WATCHER = "laws of norms"


def install(
    recorder: Recorder, log: EventLog, is_checked: Callable[[int], bool], names: ParameterNames
) -> None:
    """Wraps the function that clip_grad_norm_ looks up when it is called: programs that imported
    clip_grad_norm_ itself before are seen, too."""
    from torch.nn.utils import clip_grad

    def record(parameters: List[Any], max_norm: float, norm: Any) -> None:
        if not is_checked(recorder.current_step) or hasattr(norm, "placements"):
            return
        known = names.of(parameters)
        if not known or None in known:
            return
        log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(float(norm)),
            max_norm=float(max_norm), line=recorder.user_lines.innermost(sys._getframe(2)),
        )  # fmt: skip

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def scale(parameters: Any, max_norm: Any, norm: Any, *more: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling() and recorder.active:
                try:
                    if isinstance(parameters, list) and not recorder.broken(WATCHER):
                        record(parameters, max_norm, norm)
                except Exception as error:
                    recorder.fault(WATCHER, error)
            return original(parameters, max_norm, norm, *more, **options)

        return scale

    if not recorder.patches.replace(clip_grad, "_clip_grads_with_norm_", make):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
