"""Records, at checked steps, how many gradients of float32 have the digits of bfloat16 only, and
how many elements of parameters of 16 bits an update of torch's optimizers does not change.

rounded     step optimizer(class) matrices(whose gradients were read) rounded
halves      step names[] elements[with a gradient] kept[of these]   of parameters of 16 bits
"""

from __future__ import annotations

from itertools import islice
from typing import Any, List

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import local, placed_alike

WATCHER = "laws of gradients"
_MOST = 64  # matrices
_ELEMENTS = range(16, 1 << 22)  # of one
_ENOUGH = 1 << 13  # elements of one that are read, evenly spread
_LOW = 0xFFFF  # bits of a float32 that a bfloat16 does not have
_HALF = (torch.bfloat16, torch.float16)
_FEW = 16  # parameters of 16 bits


def install(context: LawContext) -> None:
    halves: List[Any] = []  # of the running update: parameter, its value, where it has a gradient

    def before(optimizer: Any, _closure: bool, _frame: Any) -> None:
        if capturing():
            return
        halves[:] = [
            (p, local(p).clone(), local(p.grad) != 0) for p in _of_16_bits(optimizer)[:_FEW]
        ]
        read = [_rounded(one) for one in _matrices(optimizer)]
        if read:
            device = read[0].device
            rounded = int(torch.stack([one.to(device) for one in read]).sum())
            kind = type(optimizer).__name__
            context.event("rounded", optimizer=kind, matrices=len(read), rounded=rounded)

    def after(_optimizer: Any) -> None:
        rows, halves[:] = list(halves), []
        names = context.names.of([parameter for parameter, _, _ in rows])
        if None in names:
            return
        counts = [
            torch.stack((moves.sum(), (moves & (local(p) == value)).sum()))
            for p, value, moves in rows
        ]
        elements, kept = torch.stack(counts).t().tolist()
        context.log.event("halves", step=context.step, names=names, elements=elements, kept=kept)

    context.before_step.add(WATCHER, before, checked=True)
    context.after_step.add(WATCHER, after, pending=halves)


def _of_16_bits(optimizer: Any) -> List[Any]:
    """Parameters of torch's own optimizers: others may keep elsewhere what is rounded away."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return []
    every = (p for group in optimizer.param_groups if group.get("lr") for p in group["params"])
    return [
        p for p in every
        if p.dtype in _HALF and p.grad is not None and p.grad.layout is torch.strided
        and placed_alike(p, p.grad) and 0 < local(p).numel() < _ELEMENTS.stop
    ]  # fmt: skip


def _matrices(optimizer: Any) -> List[Any]:
    every = (local(p.grad) for p in parameters_of(optimizer) if p.grad is not None)
    return list(islice(filter(_readable, every), _MOST))


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
