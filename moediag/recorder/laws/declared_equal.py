"""Records, at checked steps, tensors that a program declares to be equal on several ranks:
``DTensor.from_local`` with Replicate placements compares nothing by itself. Tensor-parallel layers
declare their inputs in this way."""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, List, Tuple

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.replica_sets import DATA_AXES
from moediag.recorder.step.numbers import Fingerprints, capturing
from moediag.recorder.step.pieces import axes_on, same_part

WATCHER = "laws of declared tensors"
_MODULE = "torch.distributed.tensor._api"
_MOST = 32  # tensors of one step


class DeclaredEqual:
    """Collects the tensors of a step; they are copied to the host when an optimizer steps."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        self._tensors: List[Dict[str, Any]] = []
        self._prints = Fingerprints()
        self._places: List[Tuple[Dict[str, Any], int]] = []  # of tensors of integers
        self._context.on_check.append(self._write)
        self._context.replace_late(_MODULE, "DTensor", "from_local", self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def from_local(
            local_tensor: Any, device_mesh: Any = None, placements: Any = None, **more: Any
        ) -> Any:
            seen = self._context.checking and torch.is_grad_enabled()
            if seen and type(local_tensor) is torch.Tensor and placements:
                self._context.guarded(
                    WATCHER, self._seen, local_tensor, device_mesh, placements, sys._getframe(1)
                )
            return original(local_tensor, device_mesh, placements, **more)

        return staticmethod(from_local)

    def _seen(self, tensor: Any, mesh: Any, placements: Any, frame: Any) -> None:
        context = self._context
        if mesh is None or torch._C._current_graph_task_id() != -1:
            return
        if context.step != self._step:
            self._step, self._tensors, self._places = context.step, [], []
            self._prints = Fingerprints()
        placed = axes_on(mesh, placements, tensor.dim())
        axes = [axis.name for axis in placed if axis.name and axis.placed.is_replicate()]
        if len(self._tensors) >= _MOST or not axes or capturing():
            return
        found = same_part(mesh, placed)
        if found is None or len(found[1]) < 2:
            return
        one: Dict[str, Any] = {
            "axes": axes, "ranks": list(found[1]), "part": found[0],
            "data": not DATA_AXES.isdisjoint(axes), "shape": list(tensor.shape),
            "line": context.line(frame),
        }  # fmt: skip
        if tensor.is_floating_point():
            self._prints.add_sketch(len(self._tensors), tensor)
        elif not tensor.is_complex():
            self._places.append((one, self._prints.add(tensor)))
        self._tensors.append(one)

    def _write(self, step: int) -> None:
        if not self._tensors or self._step != step:
            return
        read, sketches = self._prints.read(), self._prints.sketches()
        for one, place in self._places:
            one["print"] = read[place]
        for at, sketch in sketches.items():
            self._tensors[at]["sketch"] = sketch
        self._context.log.event("declared", step=step, tensors=self._tensors)
        self._tensors, self._places, self._prints = [], [], Fingerprints()
