"""Records, at checked steps, how many gradients of float32 have the digits of bfloat16 only, and
how many elements of parameters of 16 bits an update does not change.

rounded     step optimizer(class) matrices(whose gradients were read) rounded
halves      step names[] elements[with a gradient] kept[of these]   of parameters of 16 bits
"""

from __future__ import annotations

from itertools import islice
from typing import Any, List

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.model_inputs import random_states
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
# What other optimizers keep for a parameter, in which nothing of it is added up.
_MOMENTS = {"exp_avg", "exp_avg_sq", "m", "v", "momentum", "momentum_buffer", "next_m", "next_v"}


def install(context: LawContext) -> None:
    halves: List[Any] = []  # of the running update: parameter, its value, where it has a gradient
    states: List[int] = []  # of random numbers, before that of an optimizer that is not torch's

    def before(optimizer: Any, _closure: bool, _frame: Any) -> None:
        if capturing():
            return
        halves[:] = [
            (p, local(p).clone(), local(p.grad) != 0) for p in _of_16_bits(optimizer)[:_FEW]
        ]
        of_torch = type(optimizer).__module__.startswith("torch.optim.")
        states[:] = [random_states()] if halves and not of_torch else []
        read = [_rounded(one) for one in _matrices(optimizer)]
        if read:
            device = read[0].device
            rounded = int(torch.stack([one.to(device) for one in read]).sum())
            kind = type(optimizer).__name__
            context.event("rounded", optimizer=kind, matrices=len(read), rounded=rounded)

    def after(optimizer: Any) -> None:
        rows, halves[:] = list(halves), []
        parameters = [parameter for parameter, _, _ in rows]
        names = context.names.of(parameters)
        # One of the program may round at random, or add up elsewhere what is rounded away.
        moments = all(_has_moments(optimizer.state.get(p), p.dtype) for p in parameters)
        if None in names or (states and not (moments and states == [random_states()])):
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
    every = (p for group in optimizer.param_groups if group.get("lr") for p in group["params"])
    return [
        p for p in every
        if p.dtype in _HALF and p.grad is not None and p.grad.layout is torch.strided
        and placed_alike(p, p.grad) and 0 < local(p).numel() < _ELEMENTS.stop
    ]  # fmt: skip


def _has_moments(state: Any, dtype: Any) -> bool:
    """Whether the tensors of an optimizer's state are moments only, of this dtype."""
    every = {k: x for k, x in (state or {}).items() if torch.is_tensor(x) and x.dim()}
    return bool(every) and every.keys() <= _MOMENTS and {x.dtype for x in every.values()} == {dtype}


def _matrices(optimizer: Any) -> List[Any]:
    every = (local(p.grad) for p in parameters_of(optimizer) if p.grad is not None)
    return list(islice(filter(_readable, every), _MOST))


def _readable(gradient: Any) -> bool:
    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    floats = plain and gradient.dtype is torch.float32
    return floats and gradient.dim() > 1 and gradient.numel() in _ELEMENTS


def _rounded(gradient: Any) -> Any:
    """Whether none of some thousand elements has more digits, and not all are zero."""
    flat = gradient.reshape(-1)
    bits = flat[:: max(1, flat.numel() // _ENOUGH)].view(torch.int32)
    return bits.any() & ~(bits & _LOW).any()
