"""How far a tensor is from the one that a reference computed, and when that is wrong.

It is wrong if its largest absolute difference exceeds ``atol + rtol * max |reference of that
parameter|``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Optional

import torch

from moediag.protocol import GradientError, Multiple
from moediag.protocol.tolerance import GRADIENT, SMALLEST
from moediag.recorder.step import numbers


@dataclasses.dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float

    @classmethod
    def of(cls, dtype: str, references: Iterable[Optional[torch.Tensor]]) -> Tolerance:
        """``dtype``: of the parameters; ``references``: the gradients of the whole model."""
        return cls(GRADIENT.of(dtype), SMALLEST.of(dtype) * largest(references))

    def judge(
        self,
        local: Optional[torch.Tensor],
        expected: Optional[torch.Tensor],
        scale: float,
        allowed: Optional[float] = None,
    ) -> GradientError:
        """Judges one tensor. ``None`` equals zero; ``scale``: max |reference| of the whole
        parameter; ``allowed``: a bound that replaces ``rtol * scale``."""
        if local is None and expected is None:
            return GradientError(0.0, 0.0, wrong=False)
        actual = torch.zeros_like(expected) if local is None else local.detach().float().cpu()
        difference = actual if expected is None else actual - expected
        max_abs = float(difference.abs().max()) if difference.numel() else 0.0
        # `not <=` rather than `>`: a nan is wrong.
        relative = self.rtol * scale if allowed is None else allowed
        wrong = not max_abs <= self.atol + relative
        times = None if expected is None else multiple(actual, expected)
        return GradientError(
            numbers.for_json(max_abs),
            scale,
            wrong=wrong,
            missing=wrong and local is None,
            times=times,
        )


def multiple(tensor: torch.Tensor, reference: torch.Tensor) -> Optional[Multiple]:
    """Returns the tensor as a multiple of ``reference`` (same shape). None if the reference is zero
    or something is not finite."""
    x, y = tensor.double().reshape(-1), reference.double().reshape(-1)
    square = float(y @ y)
    if not math.isfinite(square) or not bool(torch.isfinite(x).all()) or square == 0:
        return None
    factor = float(x @ y) / square
    size = float(torch.linalg.vector_norm(x))
    left = float(torch.linalg.vector_norm(x - factor * y))
    return Multiple(factor, left / size if size else 0.0, tensor.numel())


def largest(tensors: Iterable[Optional[torch.Tensor]]) -> float:
    """Returns the largest absolute element; 0 where there is none."""
    present = (one for one in tensors if one is not None and one.numel())
    return max((float(one.float().abs().max()) for one in present), default=0.0)
