"""What a program clips its gradients by: the norm that it used, as far as a rank can know it."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from moediag.ranks.verify.model_pieces import NotReduced, Piece
from moediag.ranks.verify.tensor_files import Tensors
from moediag.recorder.step.hooks import StepHooks, clipping
from moediag.recorder.step.pieces import axes_of, held

_CLIPPED = 0.999  # gradients that were scaled by less than this were clipped


class Clips:
    """Watches the calls that clip. ``before(parameters)`` is called before each of them, with None
    for all parameters of the model; it returns whether any is measured."""

    def __init__(self, hooks: StepHooks, before: Callable[[Optional[List[Any]]], bool]) -> None:
        self._hooks = hooks
        self._before = before
        self._fsdp1 = False  # its method is replaced
        self._calls = 0
        self._limit: Optional[float] = None
        self._norm: Optional[float] = None

    def install(self) -> None:
        self._hooks.before_clipping(self._scaled)

    def _scaled(self, parameters: List[Any], max_norm: Any, norm: Any, _frame: Any) -> None:
        if self._before(parameters):
            self._clipped(True, max_norm, norm, None)

    def of_fsdp1(self, module: Any) -> None:
        """FSDP1 clips by a method of its own."""
        kind: Any = type(module)
        if kind.__name__ == "FullyShardedDataParallel" and not self._fsdp1:
            self._fsdp1 = True
            made = clipping(self._of_all, self._clipped)
            self._hooks.replace(kind, "clip_grad_norm_", made)

    def _of_all(self, _module: Any) -> Optional[bool]:
        return self._before(None) or None

    def _clipped(self, _measured: bool, max_norm: Any, norm: Any, _frame: Any) -> None:
        self._calls += 1
        once = self._calls == 1  # several groups are clipped apart, so no norm is that of all
        self._limit = float(max_norm) if once else None
        self._norm = _number(norm) if once else None

    def norm(self, unclipped: Tensors, own: Dict[str, Piece]) -> Optional[float]:
        """Returns the norm of this step; None if nothing was clipped, or by several norms. Where it
        is a DTensor that no rank has whole, it follows from how much the gradients shrank."""
        if self._norm is not None or self._limit is None:
            return self._norm
        shrunk = _times(unclipped, own)
        return self._limit / shrunk if shrunk is not None and shrunk < _CLIPPED else None

    @property
    def calls(self) -> int:
        """The calls that clipped in this step."""
        return self._calls

    def next_step(self) -> None:
        self._calls, self._limit, self._norm = 0, None, None


def _times(unclipped: Tensors, own: Dict[str, Piece]) -> Optional[float]:
    """Returns the factor by which this rank's gradients shrank."""
    before = after = 0.0
    for name, stored in unclipped.items():
        if stored.tensor is None or name not in own:
            continue
        try:
            gradient = own[name].gradient()
        except NotReduced:
            continue
        if gradient is not None:
            before += float(stored.tensor.double().square().sum())
            after += float(gradient.double().square().sum())
    return (after / before) ** 0.5 if before else None


def _number(value: Any) -> Optional[float]:
    """Returns a norm as a number; None for a DTensor that is not the whole norm on each rank."""
    if not all(axis.placed.is_replicate() for axis in axes_of(value)):
        return None
    return float(held(value))
