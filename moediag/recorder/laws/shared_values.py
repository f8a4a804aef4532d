"""Records, at checked steps, the backward of each ``torch.autograd.Function`` whose forward adds or
gathers values over ranks: all of them get the same result.

shared      step rows[{function(class) line op ranks[] calls(that the backward makes)
            gradient(sketch of what the backward gets) made(that of what it returns) bias matrix(of
            the layer before)}]
gathered    step rows[{line, shape, reached(whether the backward computed its gradient)}]   of what
            was gathered with gradients between a forward and its backward, outside of a Function
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.autograd.function import BackwardCFunction

from moediag.recorder.calls import Call
from moediag.recorder.groups import GroupInfo
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import unwrapped
from moediag.recorder.step.numbers import Fingerprints, capturing

WATCHER = "laws of shared values"
_OPS = ("all_reduce", "all_gather")
_MOST = 32  # of one step
_MOST_FRAMES = 12
_SHAPE_ONLY = ("View", "UnsafeView", "Reshape", "ToCopy", "Alias", "Clone")


class SharedValues:
    """Finds the running Function by its ``ctx``, which is the node of autograd itself."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        self._prints = Fingerprints()
        self._rows: List[Dict[str, Any]] = []
        self._layers: List[Optional[Tuple[Any, Any]]] = []  # of each row: bias and matrix, or None
        self._ran = False  # a forward of training, since the last backward
        self._gathered: List[Dict[str, Any]] = []
        self._context.recorder.on_call.append(self._called)
        self._context.recorder.on_forward.append(self._forward)
        self._context.recorder.hooks.after_backward(lambda: setattr(self, "_ran", False))
        self._context.on_check.append(self._write)

    def _forward(self, root: Any, *_: Any) -> None:
        self._ran = bool(unwrapped(root).training)

    def _called(self, call: Call, group: GroupInfo) -> None:
        if call.op in _OPS and self._context.checking and not capturing():
            self._context.guarded(WATCHER, self._found, call, group)

    def _found(self, call: Call, group: GroupInfo) -> None:
        frame: Any = sys._getframe(2)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            for given in call.inputs if self._ran and len(self._gathered) < _MOST else ():
                self._follow_gathered(given, frame)
            return
        for _ in range(_MOST_FRAMES):
            if frame is None:
                return
            if frame.f_code.co_name == "forward":
                node = frame.f_locals.get("ctx")
                if isinstance(node, BackwardCFunction) and any(node.needs_input_grad):
                    self._follow(node, call, group, frame)
                    return
            frame = frame.f_back

    def _follow_gathered(self, given: Any, frame: Any) -> None:
        if type(given) is torch.Tensor and given.requires_grad and given.dim() > 1:
            line = self._context.line(frame)
            row = {"line": line, "shape": list(given.shape), "reached": False}
            self._gathered.append(row)
            given.register_hook(lambda _gradient: row.update(reached=True))

    def _follow(self, node: Any, call: Call, group: GroupInfo, frame: Any) -> None:
        context = self._context
        row: Dict[str, Any] = {
            "function": type(node).__name__, "op": call.op, "ranks": list(group.ranks),
            "line": context.line(frame), "calls": 0,
        }  # fmt: skip

        def before(gradients: Any) -> None:
            if context.step != self._step:
                self._step, self._rows, self._layers = context.step, [], []
                self._prints = Fingerprints()
            given = [one for one in gradients if one is not None]
            if not given or len(self._rows) >= _MOST or row in self._rows:
                return
            row["calls"] = -context.recorder.issued
            whole = given[0] if len(given) == 1 else torch.cat([one.reshape(-1) for one in given])
            self._prints.add_sketch(len(self._rows), whole)
            self._rows.append(row)
            self._layers.append(_layer(node))

        def after(made: Any, _given: Any) -> None:
            if row["calls"] < 0:
                row["calls"] += context.recorder.issued
                at = next(at for at, one in enumerate(self._rows) if one is row)
                for one in [one for one in made if one is not None][:1]:
                    self._prints.add_sketch(~at, one)

        node.register_prehook(functools.partial(context.guarded, WATCHER, before))
        node.register_hook(functools.partial(context.guarded, WATCHER, after))

    def _write(self, step: int) -> None:
        rows, self._rows = self._rows, []
        gathered, self._gathered = self._gathered, []
        if gathered and not (self._ran or self._context.closure):
            self._context.log.event("gathered", step=step, rows=gathered)
        if step != self._step or not rows:
            return
        sketches = self._prints.sketches()
        for at, (row, layer) in enumerate(zip(rows, self._layers)):  # noqa: B905 - Python 3.9
            row["gradient"], row["made"] = sketches.get(at), sketches.get(~at)
            row["bias"], row["matrix"] = self._context.names.of(list(layer)) if layer else ("", "")
        self._context.log.event("shared", step=step, rows=rows)


def _layer(node: Any) -> Optional[Tuple[Any, Any]]:
    """The bias and the matrix of the linear layer that made the input of a node; None without."""
    made: Any = node.next_functions[0][0] if node.next_functions else None
    while type(made).__name__.startswith(_SHAPE_ONLY):
        made = made.next_functions[0][0]
    if not type(made).__name__.startswith("Addmm"):
        return None
    bias, _, matrix = (one for one, _ in made.next_functions)
    while type(matrix).__name__.startswith(("T", *_SHAPE_ONLY)):
        matrix = matrix.next_functions[0][0]
    found = tuple(getattr(one, "variable", None) for one in (bias, matrix))
    return (found[0], found[1]) if None not in found else None
