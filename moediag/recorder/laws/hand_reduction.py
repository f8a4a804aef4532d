"""Records, at checked steps, what a program does between the backward and the update with gradients
that no wrapper reduces: sketches of both.

own_gradients   step names[] made[sketch of what the backwards made] used[sketch before the update]
divisors        step units[[a parameter's name, by what FSDP2 divides, whether the program set it]]
rescaled        step ranks[of the mesh] made[norm of the gradient of a shard of FSDP2 after the last
                backward] used[before the update]
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any, Callable, Dict, List, Tuple

import torch

from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.modules import Handles
from moediag.recorder.step.numbers import Fingerprints, capturing
from moediag.recorder.step.pieces import local

WATCHER = "laws of gradients"
_MOST = 64  # matrices
_MOST_ELEMENTS = 1 << 22  # of one
_FEW = 16  # shards
_ENOUGH = 2  # steps, after which all units have run


class HandReduction:
    """Reads the gradients of some matrices in each backward of a checked step, before hooks of the
    program, which may divide or reduce them."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        # Id -> a matrix, and the numbers of the sketches whose sum is what was made.
        self._rows: Dict[int, Tuple[Any, List[int]]] = {}
        self._prints = Fingerprints()
        self._made = 0  # sketches
        self._handles = Handles()
        self._shards: List[Tuple[Any, Any]] = []  # a shard of FSDP2, the norm of its gradient
        self._over: List[int] = []  # the ranks of its mesh
        context.before_backward.add(WATCHER, self._before, checked=True)
        context.after_backward.add(WATCHER, self._handles.remove_all, pending=self._handles)
        context.after_backward.add(WATCHER, self._reduced, checked=True)
        context.on_check.append(self._write)

    def _before(self, _loss: Any) -> None:
        self._handles.remove_all()  # of a backward that raised
        step = self._context.step
        if step != self._step:
            self._step, self._rows, self._prints = step, {}, Fingerprints()
        if capturing() or not several_ranks():
            return
        models = self._context.sets.plain_models()
        every = (p for m in models for p in self._context.parts(m).parameters if _small(p))
        for parameter in islice(every, _MOST):
            row = self._rows.setdefault(id(parameter), (parameter, []))[1]
            if parameter.grad is None:
                row.clear()
            add = functools.partial(self._context.guarded, WATCHER, self._add, row)
            self._handles.append(_first_hook(parameter, add))

    def _add(self, row: List[int], gradient: Any) -> None:
        self._prints.add_sketch(self._made, gradient)
        row.append(self._made)
        self._made += 1

    def _reduced(self) -> None:
        """FSDP2 has reduced the gradients of its shards."""
        if not capturing() and several_ranks():
            groups = list(self._context.recorder.fsdp2_groups())
            shards = (one.sharded_param for of in groups for one in getattr(of, "fsdp_params", ()))
            found = (p for p in shards if p.grad is not None and local(p.grad).numel())
            self._shards = [(p, _norm(p)) for p in islice(found, _FEW)]
            meshes = (one.mesh_info.mesh.mesh.flatten().tolist() for one in groups)
            self._over = sorted(next(meshes, []))
            if groups and self._context.step == _ENOUGH:
                self._tell_divisors(groups)

    def _tell_divisors(self, groups: List[Any]) -> None:
        rows = []
        for of in groups:
            trained = [p for p in (one.sharded_param for one in of.fsdp_params) if p.requires_grad]
            chosen = of.gradient_divide_factor
            divisor = of.mesh_info.mesh.size() if chosen is None else chosen
            for name, _ in self._context.names.known(trained[:1]):
                rows.append([name, divisor, chosen is not None])
        self._context.log.event("divisors", keep=True, step=_ENOUGH, units=rows)

    def _write(self, step: int) -> None:
        shards = [(p, norm) for p, norm in self._shards if p.grad is not None]
        self._shards = []
        if shards:
            self._context.log.event(
                "rescaled", step=step, ranks=self._over,
                made=[float(norm) for _, norm in shards],
                used=[float(_norm(p)) for p, _ in shards],
            )  # fmt: skip
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
        )  # fmt: skip


def _norm(parameter: Any) -> torch.Tensor:
    return local(parameter.grad).norm(dtype=torch.float32)


def _small(parameter: Any) -> bool:
    return parameter.requires_grad and parameter.dim() > 1 and parameter.numel() <= _MOST_ELEMENTS


def _readable(gradient: Any) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _first_hook(parameter: Any, act: Callable[[Any], None]) -> Any:
    """A hook that runs before those that the parameter has."""
    handle = parameter.register_hook(act)
    hooks = parameter._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle
