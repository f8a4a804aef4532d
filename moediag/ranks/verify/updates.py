"""Compares how far the optimizer has moved each weight since the start.

An optimizer that normalises its step (AdamW) turns rounding errors of a gradient near zero into
full steps, so only elements with a gradient well above rounding are compared.
"""

from __future__ import annotations

from typing import Dict, Optional

import torch

from moediag.protocol import GradientError
from moediag.ranks.verify.noise import TIMES, Noise
from moediag.ranks.verify.runs import Alone
from moediag.ranks.verify.tensor_files import Stored, Tensors
from moediag.recorder.step import numbers
from moediag.recorder.step.tensor_error import largest

ABOVE = 4.0  # a gradient this many times its allowed error is not noise
TOLERANCE = 0.1  # relative, in the L2 norm: no error of an optimizer is smaller
_MOST = 100  # of a parameter's elements, one in this many must be comparable


class Updates:
    """Compares step after step; ``alone`` and ``rounded`` are runs of one process."""

    def __init__(self, alone: Alone, rounded: Alone) -> None:
        self._alone = alone
        self._rounded = rounded
        self._clear: Dict[str, torch.Tensor] = {}  # elements that were comparable in every step

    def step(self, number: int, noise: Noise) -> None:
        """Begins step ``number`` (from 1), in order."""
        for name, gradient in self._alone.gradients[number - 1].items():
            if gradient is None:
                self._clear.pop(name, None)
                continue
            scale = largest([gradient])
            clear = gradient.float().abs() >= ABOVE * max(noise.allowed(name, scale), 1e-30)
            if number > 1:
                known = self._clear.get(name)
                clear = clear & known if known is not None else torch.zeros_like(clear)
            self._clear[name] = clear

    def compare(self, number: int, start: Tensors, after: Tensors) -> Dict[str, GradientError]:
        """Returns by parameter the error of one rank's weights after step ``number``; ``scale`` is
        how far the reference has moved them. Omits what cannot be compared."""
        found: Dict[str, GradientError] = {}
        weights = self._alone.weights[number - 1]
        for name, stored in after.items():
            began, ended, first = self._alone.start.get(name), weights.get(name), start.get(name)
            if began is None or ended is None or first is None or name not in self._clear:
                continue
            rounding = self._rounding(number, name)
            one = _one(stored, first, began, ended, self._clear[name], rounding)
            if one is not None:
                found[name] = one
        return found

    def _rounding(self, number: int, name: str) -> Optional[torch.Tensor]:
        """Returns how far the rounded run has moved the weights differently."""
        began, ended = self._rounded.start.get(name), self._rounded.weights[number - 1].get(name)
        first, last = self._alone.start.get(name), self._alone.weights[number - 1].get(name)
        if began is None or ended is None or first is None or last is None:
            return None
        return (ended.double() - began.double()) - (last.double() - first.double())


def _one(
    stored: Stored,
    first: Stored,
    began: torch.Tensor,
    ended: torch.Tensor,
    clear: torch.Tensor,
    rounding: Optional[torch.Tensor],
) -> Optional[GradientError]:
    if stored.tensor is None or first.tensor is None or not stored.tensor.numel():
        return None
    local = tuple(stored.tensor.shape)
    if stored.where.shape != tuple(began.shape):
        return None
    mask = stored.where.cut(clear, local)
    if int(mask.sum()) * _MOST < mask.numel():
        return None
    moved = (stored.tensor.double() - first.tensor.double())[mask]
    right = stored.where.cut(ended.double() - began.double(), local)[mask]
    noise = stored.where.cut(rounding, local)[mask] if rounding is not None else right * 0
    # Each weight is rounded to its dtype after the step.
    ulp = first.tensor.double().abs()[mask] * torch.finfo(stored.tensor.dtype).eps
    size, error = float(right.norm()), float((moved - right).norm())
    allowed = TOLERANCE * size + TIMES * float(noise.norm()) + 2 * float(ulp.norm())
    return GradientError(
        numbers.for_json(float((moved - right).abs().max())),
        float(right.abs().max()),
        wrong=not error <= allowed,
    )
