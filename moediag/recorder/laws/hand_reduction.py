"""Records, at checked steps, what a program does between the backward and the update with gradients
that no wrapper reduces: sketches of both.

own_gradients   step names[] made[sketch of what the backwards made] used[sketch before the update]
                hooked(bool: all of ``made`` were read before hooks of the program)
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.step.numbers import Fingerprints, capturing

WATCHER = "laws of gradients"
_MOST = 64  # matrices
_MOST_ELEMENTS = 1 << 22  # of one


class HandReduction:
    """Reads the gradients of some matrices in each backward of a checked step: those of parameters
    with hooks of the program, which may divide or reduce them, before these hooks."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        # Id -> a matrix, and the numbers of the sketches that together are what was made.
        self._rows: Dict[int, Tuple[Any, List[int]]] = {}
        self._prints = Fingerprints()
        self._sketches = 0
        self._handles: List[Any] = []

    def install(self) -> None:
        context = self._context
        context.recorder.hooks.before_backward(
            functools.partial(context.guarded, WATCHER, self._before)
        )
        context.recorder.hooks.after_backward(
            functools.partial(context.guarded, WATCHER, self._after)
        )
        context.on_check.append(self._write)

    def _matrices(self) -> Iterator[Any]:
        if self._context.checking and not capturing() and several_ranks():
            models = self._context.sets.plain_models()
            every = (p for model in models for p in model.parameters() if p.requires_grad)
            yield from islice((p for p in every if _small(p)), _MOST)

    def _before(self, _loss: Any) -> None:
        self._release()
        step = self._context.recorder.current_step
        if step != self._step:
            self._step, self._rows, self._prints, self._sketches = step, {}, Fingerprints(), 0
        for parameter in filter(_hooked, self._matrices()):
            row = self._rows.setdefault(id(parameter), (parameter, []))[1]
            if parameter.grad is None:
                row.clear()
            add = functools.partial(self._context.guarded, WATCHER, self._add, row)
            self._handles.append(_first_hook(parameter, add))

    def _add(self, row: List[int], gradient: Any) -> None:
        self._prints.add_sketch(self._sketches, gradient)
        row.append(self._sketches)
        self._sketches += 1

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _after(self) -> None:
        self._release()
        for parameter in self._matrices():
            if not _hooked(parameter) and _readable(parameter.grad):
                self._rows[id(parameter)] = parameter, []
                self._add(self._rows[id(parameter)][1], parameter.grad)

    def _write(self, step: int) -> None:
        rows = [(p, own) for p, own in self._rows.values() if own and _readable(p.grad)]
        self._rows = {}
        if step != self._step or not rows:
            return
        now, made = Fingerprints(), self._prints.sketches()
        for at, (parameter, _) in enumerate(rows):
            now.add_sketch(at, parameter.grad)
        used, names = now.sketches(), self._context.names.of([p for p, _ in rows])
        found = [at for at, (_, own) in enumerate(rows) if names[at] and {*own} <= made.keys()]
        self._context.log.event(
            "own_gradients", step=step, names=[names[at] for at in found],
            made=[[sum(made[one][k] for one in rows[at][1]) for k in (0, 1)] for at in found],
            used=[used[at] for at in found],
            hooked=all(_hooked(parameter) for parameter, _ in rows),
        )  # fmt: skip


def _small(parameter: Any) -> bool:
    return parameter.dim() > 1 and parameter.numel() <= _MOST_ELEMENTS


def _readable(gradient: Any) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _hooked(parameter: Any) -> bool:
    """Whether the program has hooks that get the gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _first_hook(parameter: Any, act: Callable[[Any], None]) -> Any:
    """A hook that runs before those that the parameter has."""
    handle = parameter.register_hook(act)
    hooks = parameter._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle
