"""Records, at checked steps, how many gradients of float32 have the digits of bfloat16 only.

rounded     step optimizer(class) matrices(whose gradients were read) rounded
"""

from __future__ import annotations

import functools
from typing import Any, List

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import held

WATCHER = "laws of gradients"
_MOST = 64  # matrices
_ELEMENTS = range(16, 1 << 22)  # of one
_ENOUGH = 1 << 13  # elements of one that are read, evenly spread
_LOW = 0xFFFF  # bits of a float32 that a bfloat16 does not have


def install(context: LawContext) -> None:
    def before(optimizer: Any, _closure: bool, _frame: Any) -> None:
        if not context.checking or capturing():
            return
        with torch.no_grad():
            read = [_rounded(one) for one in _matrices(optimizer)]
            if read:
                device = read[0].device
                context.log.event(
                    "rounded", step=context.recorder.current_step, matrices=len(read),
                    optimizer=type(optimizer).__name__,
                    rounded=int(torch.stack([one.to(device) for one in read]).sum()),
                )  # fmt: skip

    context.recorder.hooks.before_step(functools.partial(context.guarded, WATCHER, before))


def _matrices(optimizer: Any) -> List[Any]:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    local = [held(gradient) for gradient in gradients if gradient is not None]
    return [one for one in local if _readable(one)][:_MOST]


def _readable(gradient: Any) -> bool:
    return (
        type(gradient) is torch.Tensor
        and gradient.dtype is torch.float32
        and gradient.dim() > 1
        and gradient.layout is torch.strided
        and gradient.numel() in _ELEMENTS
    )


def _rounded(gradient: Any) -> Any:
    """Whether none of some thousand elements has more digits, and not all are zero."""
    flat = gradient.reshape(-1)
    bits = flat[:: max(1, flat.numel() // _ENOUGH)].view(torch.int32)
    return bits.any() & ~(bits & _LOW).any()
