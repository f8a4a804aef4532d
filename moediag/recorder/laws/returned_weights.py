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
from moediag.recorder.step.numbers import capturing
from moediag.recorder.step.pieces import local

WATCHER = "laws of returned weights"
_SAMPLE = 16  # elements of a parameter
_LEAST = 4
_MANY = 64  # updates whose samples are copied to the host together
_FAR = 3  # updates; two values in turn are an oscillation
_MOST = 1 << 16  # values that are remembered
_MOST_OPTIMIZERS = 64
_MOST_TOLD = 16  # of one


class _Samples:
    """The first elements of the first and of the last parameter of an optimizer before each of its
    updates, which is all that is done in every step."""

    def __init__(self, optimizer: Any) -> None:
        every = [p for group in optimizer.param_groups for p in group["params"] if _readable(p)]
        self.parameters = [weakref.ref(p) for p in every[:1] + every[1:][-1:]]
        self.names: List[Optional[str]] = [None for _ in self.parameters]
        self.rows: List[Tuple[int, List[Any]]] = []  # step and samples of updates, not yet read
        self.count = 0  # updates that were read
        self.told = 0
        # Of each parameter: value -> number and step of the first update, number of the last one.
        self.seen: List[Dict[int, Tuple[int, int, int]]] = [{} for _ in self.parameters]

    def add(self, context: LawContext) -> None:
        alive = [p for p in (one() for one in self.parameters) if p is not None]
        if len(alive) < len(self.names):
            return
        if None in self.names and context.checking:
            self.names = context.names.of(alive)
        own = [local(p).reshape(-1)[:_SAMPLE].clone() for p in alive]
        self.rows.append((context.recorder.current_step, own))

    def read(self, context: LawContext) -> None:
        """Values of the first update are not told: a search or a fold begins anew."""
        rows, self.rows = self.rows, []
        if not rows:
            return
        for at, (name, known) in enumerate(zip(self.names, self.seen)):  # noqa: B905 - Python 3.9
            values = torch.stack([samples[at] for _, samples in rows]).tolist()
            for number, value in enumerate(values, self.count):
                step, key = rows[number - self.count][0], hash(tuple(value))
                first, since, last = known.get(key, (number, step, number))
                returned = first > 0 and number - last >= _FAR
                if returned and name is not None and self.told < _MOST_TOLD:
                    self.told += 1
                    context.log.event("returned", keep=True, step=step, name=name, since=since)
                known[key] = first, since, number
            if len(known) > _MOST:
                known.clear()
        self.count += len(rows)


class ReturnedWeights:
    """Compares the samples of each optimizer after some updates and at the end, when the optimizer
    may not exist any more."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._optimizers = ByObject()  # optimizer -> _Samples
        self._all: List[_Samples] = []

    def install(self) -> None:
        guarded = functools.partial(self._context.guarded, WATCHER)
        self._context.recorder.hooks.before_step(functools.partial(guarded, self._before))
        self._context.recorder.on_end.append(functools.partial(guarded, self._end))

    def _before(self, optimizer: Any, _closure: bool, _frame: Any) -> None:
        own = self._optimizers.get(optimizer)
        if capturing() or (own is None and len(self._all) >= _MOST_OPTIMIZERS):
            return
        if own is None:
            own = self._optimizers.set(optimizer, _Samples(optimizer))
            self._all.append(own)
        own.add(self._context)
        if len(own.rows) >= _MANY:
            own.read(self._context)

    def _end(self) -> None:
        for own in self._all:
            own.read(self._context)


def _readable(parameter: Any) -> bool:
    own = local(parameter)
    return (
        parameter.requires_grad
        and own.layout is torch.strided
        and own.is_floating_point()
        and own.is_contiguous()
        and own.numel() >= _LEAST
    )
