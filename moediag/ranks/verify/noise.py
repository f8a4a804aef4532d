"""How much a gradient and an update differ between runs that should agree: measured, not chosen.

The reference runs three times: twice alike, which shows whether it is deterministic, and once from
weights that are changed by one rounding error. The difference of that run is what rounding does to
each gradient in this model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

from moediag.protocol.tolerance import GRADIENT
from moediag.ranks.verify.runs import Alone, Wholes
from moediag.recorder.step.tensor_error import largest as largest_element

# Allowed error as a multiple of what rounding does. The largest one of 12 small models in bfloat16
# over 3 steps was 2.7 (docs/explanation/design/verify.md).
TIMES = 8.0
# The floor after the first step: AdamW turns rounding errors of gradients near zero into full
# steps, and which ones differs from run to run.
LEAST_LATER = 3e-2
_MOST_OF = 0.9  # of the parameters: one run is one sample, and for a small parameter a lucky one
# Relative; above this the reference proves nothing.
MOST = 0.3
REPEATS = 1e-2  # relative difference of two equal runs that counts as another result


@dataclass(frozen=True)
class Noise:
    """What rounding does, by parameter, in one step."""

    largest: Dict[str, float]  # absolute
    usual: float  # relative; nine of ten parameters have less
    one_rounding: float  # relative, of the coarsest dtype
    least: float = GRADIENT.floor

    def allowed(self, name: str, scale: float) -> float:
        """Returns the allowed absolute error of a gradient whose largest element is ``scale``."""
        relative = max(self.usual, self.one_rounding) * scale
        return max(TIMES * max(self.largest.get(name, 0.0), relative), self.least * scale)


def of_step(alone: Alone, again: Alone, rounded: Alone, number: int, dtypes: List[str]) -> Noise:
    """Returns the noise of the gradients of step ``number`` (from 1)."""
    expected = alone.gradients[number - 1]
    others = [run.gradients[number - 1] for run in (again, rounded)]
    largest: Dict[str, float] = {}
    relative = []
    for name, gradient in expected.items():
        if gradient is None:
            continue
        differences = [apart(gradient, other.get(name)) for other in others]
        largest[name] = max(differences)
        scale = largest_element([gradient])
        if scale:
            relative.append(largest[name] / scale)
    relative.sort()
    usual = relative[int(_MOST_OF * (len(relative) - 1))] if relative else 0.0
    return Noise(largest, usual, coarsest(dtypes), GRADIENT.floor if number == 1 else LEAST_LATER)


def coarsest(dtypes: List[str]) -> float:
    """Returns one rounding error of the coarsest dtype, relative."""
    found = [getattr(torch, name) for name in dtypes]
    return max((float(torch.finfo(d).eps) / 2 for d in found if d.is_floating_point), default=0.0)


def apart(one: torch.Tensor, other: Optional[torch.Tensor]) -> float:
    """Returns the largest absolute difference; a missing gradient is zero. nan is infinite."""
    difference = one.float() if other is None else one.float() - other.float()
    found = float(difference.abs().max()) if difference.numel() else 0.0
    return math.inf if math.isnan(found) else found


def disagreement(one: Wholes, other: Wholes) -> float:
    """Returns how far two sets of gradients are apart, in the L2 norm, relative to ``one``."""
    square = left = 0.0
    for name, gradient in one.items():
        if gradient is None:
            continue
        counterpart = other.get(name)
        difference = gradient.double() if counterpart is None else gradient.double() - counterpart
        square += float(gradient.double().square().sum())
        left += float(difference.square().sum())
    return math.sqrt(left / square) if square else 0.0
