"""Records, at checked steps, what a program does between the backward and the update with gradients
that no wrapper reduces: sketches of both.

own_gradients   step names[] made[sketch after the last backward] used[sketch before the update]
"""

from __future__ import annotations

import functools
from typing import Any, List

import torch
import torch.distributed as dist

from moediag.recorder.laws.context import LawContext
from moediag.recorder.step.numbers import Fingerprints, capturing

WATCHER = "laws of gradients"
_MOST = 64  # matrices
_MOST_ELEMENTS = 1 << 22  # of one


class HandReduction:
    """Reads the gradients of some matrices after each backward of a checked step."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        self._made: List[Any] = []  # matrices, in the order of the sketches
        self._prints = Fingerprints()

    def install(self) -> None:
        context = self._context
        after = functools.partial(context.guarded, WATCHER, self._after)
        context.recorder.hooks.after_backward(after)
        context.on_check.append(self._write)

    def _after(self) -> None:
        if not self._context.checking or capturing() or not _several():
            return
        self._step = self._context.recorder.current_step
        self._prints = Fingerprints()
        self._made = []
        for model in self._context.sets.plain_models():
            for parameter in model.parameters():
                if len(self._made) < _MOST and _readable(parameter):
                    self._prints.add_sketch(len(self._made), parameter.grad)
                    self._made.append(parameter)

    def _write(self, step: int) -> None:
        made, self._made = self._made, []
        if step != self._step or not made:
            return
        now = Fingerprints()
        for at, parameter in enumerate(made):
            if _readable(parameter):
                now.add_sketch(at, parameter.grad)
        before, after = self._prints.sketches(), now.sketches()
        names = {at: name for at, name in enumerate(self._context.names.of(made)) if name}
        rows = [at for at in names if at in before and at in after]
        self._context.log.event(
            "own_gradients", step=step, names=[names[at] for at in rows],
            made=[before[at] for at in rows], used=[after[at] for at in rows],
        )  # fmt: skip


def _readable(parameter: Any) -> bool:
    gradient = parameter.grad
    return (
        type(gradient) is torch.Tensor
        and gradient.dim() > 1
        and gradient.layout is torch.strided
        and gradient.numel() <= _MOST_ELEMENTS
        # A hook of the program may divide or reduce the gradient before it is read here.
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
