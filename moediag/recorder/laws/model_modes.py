"""Records each change between training and evaluation mode of a model that runs with gradients, and
at checked steps whether a model that is being trained runs in training mode."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Set

import torch
from torch.nn.modules import batchnorm, dropout

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import unwrapped

MOST_CHANGES = 100  # of one model that are recorded


class _Ran:
    """One model in one step."""

    __slots__ = ("changes", "modes", "now", "number", "step", "told")

    def __init__(self, number: int) -> None:
        self.number = number
        self.now: Optional[bool] = None  # the mode of its last forward
        self.changes = 0
        self.step = 0
        self.modes: Set[bool] = set()  # of its forwards with gradients; True: training
        self.told: Set[bool] = set()


class ModelModes:
    """A model is trained where an optimizer that steps has a parameter with a gradient of it: the
    teacher of a distillation is not."""

    def __init__(self, context: LawContext, owned: Callable[[], List[Any]]) -> None:
        self._context = context
        self._owned = owned  # parameters of the optimizers that stepped
        self._models = ByObject()  # model -> _Ran
        self._seen = 0  # models so far; a freed one's number is not used again

    def install(self) -> None:
        self._context.recorder.on_forward.append(self._called)
        self._context.on_check.append(self._write)

    def _called(self, root: Any, *_: Any) -> None:
        step = self._context.recorder.current_step
        ran = self._models.get(root)
        if ran is None:
            ran = self._models.set(root, _Ran(self._seen))
            self._seen += 1
        # Lightning changes the mode of the model and not of the wrapper.
        training = bool(unwrapped(root).training)
        if ran.step != step:
            ran.step, ran.modes, ran.told = step, set(), set()
        ran.modes.add(training)
        if training != ran.now:
            ran.now = training
            ran.changes += 1
            if ran.changes <= MOST_CHANGES:
                self._context.log.event(
                    "mode_change", keep=True, step=step, model=ran.number, training=training
                )

    def _write(self, step: int) -> None:
        owned = set(map(id, self._owned()))
        for root in self._models.owners():
            ran = self._models.get(root)
            new = ran.modes - ran.told if ran.step == self._context.recorder.current_step else ()
            if not new or not any(p.grad is not None and id(p) in owned for p in root.parameters()):
                continue
            ran.told |= new
            kinds = {type(m).__name__ for m in root.modules() if _depends_on_mode(m)}
            for training in sorted(new):
                self._context.log.event(
                    "mode", step=step, model=ran.number, name=type(root).__name__,
                    training=training, kinds=sorted(kinds),
                )  # fmt: skip


def _depends_on_mode(module: torch.nn.Module) -> bool:
    """Whether the module computes something else in evaluation mode."""
    if isinstance(module, dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, batchnorm._BatchNorm) and module.track_running_stats
