"""Records when weights have again, before an update, the values of a much earlier one.

returned    step name since[step of the first update that had these values]
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import held

WATCHER = "laws of returned weights"
_SAMPLE = 16  # elements of a parameter
_LEAST = 4
_MANY = 64  # updates whose samples are copied to the host together
_FAR = 3  # updates; two values in turn are an oscillation
_MOST = 1 << 16  # values that are remembered
_MOST_TOLD = 16  # of an optimizer
_MOST_OPTIMIZERS = 64


class _Samples:
    """The first elements of an optimizer's last matrix before each of its updates, which is all
    that is read in every step."""

    def __init__(self, optimizer: Any) -> None:
        every = list(filter(_readable, parameters_of(optimizer)))
        chosen = next((p for p in reversed(every) if p.dim() > 1), every[-1] if every else None)
        self.parameter: Any = None if chosen is None else weakref.ref(chosen)
        self.name: Optional[str] = None
        self.rows: List[Tuple[int, Any]] = []  # steps and samples of updates that were not yet read
        self.count = 0  # updates that were read
        self.told = 0
        # Value -> number and step of the first update that had it, number of the last one.
        self.seen: Dict[int, Tuple[int, int, int]] = {}

    def add(self, context: LawContext) -> None:
        parameter = None if self.parameter is None else self.parameter()
        if parameter is None:
            return
        if self.name is None and context.checking:
            (self.name,) = context.names.of([parameter])
        own = held(parameter).detach()
        if own.numel() < _LEAST:
            return
        sample = torch.as_strided_copy(own, (min(own.numel(), _SAMPLE),), (1,))
        self.rows.append((context.step, sample))

    def read(self, context: LawContext) -> None:
        """Values of the first update are not told: a search or a fold begins anew. Nor are samples
        of few different numbers, such as clamped weights."""
        rows, self.rows = self.rows, []
        values = torch.stack([sample for _, sample in rows]).tolist() if rows else []
        for (step, _), value in zip(rows, values):  # noqa: B905 - Python 3.9
            key = hash(tuple(value))
            first, since, last = self.seen.get(key, (self.count, step, self.count))
            returned = first > 0 and self.count - last >= _FAR and self.name is not None
            if returned and len({*map(abs, value)}) >= _LEAST and self.told < _MOST_TOLD:
                self.told += 1
                context.log.event("returned", keep=True, step=step, name=self.name, since=since)
            self.seen[key] = first, since, self.count
            self.count += 1
        if len(self.seen) > _MOST:
            self.seen.clear()


def install(context: LawContext) -> None:
    optimizers = ByObject()  # optimizer -> _Samples
    every: List[_Samples] = []  # also those of freed optimizers

    def before(optimizer: Any, _closure: bool, _frame: Any) -> None:
        own = optimizers.get(optimizer)
        if own is None and len(every) < _MOST_OPTIMIZERS:
            own = optimizers.set(optimizer, _Samples(optimizer))
            every.append(own)
        if own is not None and not capturing():
            own.add(context)
            if len(own.rows) >= _MANY:
                own.read(context)

    def end() -> None:
        for own in every:
            own.read(context)

    context.before_step.add(WATCHER, before)
    context.recorder.on_end.append(functools.partial(context.guarded, WATCHER, end))


def _readable(parameter: Any) -> bool:
    """Not of 16 bits: few of these move, and single ones may well move back."""
    own = held(parameter)
    plain = parameter.requires_grad and own.layout is torch.strided and own.is_contiguous()
    exact = own.is_floating_point() and own.element_size() >= torch.float32.itemsize
    return plain and exact and own.numel() >= _LEAST
