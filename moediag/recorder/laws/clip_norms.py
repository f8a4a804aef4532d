"""Records, at checked steps, the norm by which torch.nn.utils or DeepSpeed scales gradients,
whether a GradScaler has yet to divide them by the loss scale, and which calls a backward followed.

unclipped   step(of the call) line   the call clipped gradients or found none, a backward added to
            all gradients of its parameters, and the update used them
"""

from __future__ import annotations

import functools
import math
from typing import Any, List, Optional, Set, Tuple

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.step.hooks import clipping
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import local

WATCHER = "laws of norms"
_DEEPSPEED = "deepspeed.runtime.engine"


class _Call:
    """A call that clipped, or found no gradients, until the update of its parameters."""

    def __init__(self, parameters: List[Any], step: int, line: str) -> None:
        self.parameters = parameters
        self.step = step
        self.line = line
        self.before: List[Any] = []  # the gradients before the running backward, and their versions
        self.added: Set[int] = set()  # ids of parameters to which a backward added since
        self.trained: Set[int] = set()  # of those that have a gradient

    def end(self) -> None:
        """The backward ended."""
        pairs, self.before = zip(self.parameters, self.before), []  # noqa: B905 - Python 3.9
        for parameter, (gradient, version) in pairs:
            now, new = _state(parameter)
            if now is not None:
                self.trained.add(id(parameter))
                if now is not gradient or new != version:
                    self.added.add(id(parameter))

    def is_of(self, parameters: List[Any]) -> bool:
        return not {id(p) for p in self.parameters}.isdisjoint(map(id, parameters))


def _state(parameter: Any) -> Tuple[Any, int]:
    """Its gradient, and the gradient's version."""
    gradient = parameter.grad
    return gradient, -1 if gradient is None else local(gradient)._version


def install(context: LawContext, scale: LossScale) -> None:
    recorder = context.recorder
    waiting: List[_Call] = []

    def take(parameters: List[Any]) -> List[_Call]:
        found = [call for call in waiting if call.is_of(parameters)]
        waiting[:] = [call for call in waiting if call not in found]
        return found

    def before_backward(_loss: Any) -> None:
        # What no optimizer of torch updates is not kept.
        waiting[:] = [call for call in waiting if call.step >= recorder.current_step - 1]
        for call in () if capturing() else waiting:
            call.before = [_state(parameter) for parameter in call.parameters]

    def after_backward() -> None:
        for call in () if capturing() else waiting:
            call.end()

    def updated(optimizer: Any) -> None:
        every = [p for group in optimizer.param_groups for p in group["params"]] if waiting else []
        for call in take(every):
            if call.trained and call.trained <= call.added:
                context.log.event("unclipped", step=call.step, line=call.line)

    def record(
        parameters: List[Any], max_norm: float, norm: Any, frame: Any, squares: Any = None
    ) -> None:
        take(parameters)
        known = context.names.of(parameters) if context.checking else []
        if hasattr(norm, "placements") or not known or None in known:
            return
        line, number = recorder.user_lines.innermost(frame), float(norm)
        if math.isfinite(max_norm) and not 0 < number <= max_norm:  # else it may only measure
            waiting.append(_Call(parameters, recorder.current_step, line))
        context.log.event(
            "norm", step=recorder.current_step, names=known, norm=repr(number),
            max_norm=float(max_norm), line=line, scale=scale.still_in(parameters),
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

    recorder.hooks.after_step(functools.partial(context.guarded, WATCHER, updated))
    recorder.hooks.before_backward(functools.partial(context.guarded, WATCHER, before_backward))
    recorder.hooks.after_backward(functools.partial(context.guarded, WATCHER, after_backward))
    if not recorder.hooks.before_clipping(before):
        recorder.note_not_seen("laws: norms of clip_grad_norm_ (this torch has another one)")
    context.replace_late(_DEEPSPEED, "", "clip_grad_norm_", clipping(measured, after))
