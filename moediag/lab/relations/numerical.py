"""Finite differences of the loss: the second route for gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Sequence

import torch

from moediag.lab.relations.relation import Case, Tensors

STEP = 1e-3
# Smaller ones may stay on one side of a point where the router chooses other experts. The large one
# is for slopes that are lost in the rounding of the loss, which every family computes in fp32.
STEPS = (STEP, STEP / 3, STEP / 10, 10 * STEP)
NOISE = 1e-4  # of a difference, where a family computes parts in fp32
AGREES = 0.2  # of the difference
PREFIX = "gradient of "


def sides_with_plain(
    case: Case, wrong: Sequence[str], plain: Tensors, other: Tensors
) -> Optional[bool]:
    """Whether a finite difference of the loss on ``case.tokens()``, in float64, agrees with
    ``plain`` and not with ``other``, at the coordinate where they differ most. None if no gradient
    differs."""
    name = next((n for n in wrong if n.startswith(PREFIX)), None)
    if name is None:
        return None
    difference = (plain[name] - other[name]).abs()
    place = int(difference.argmax())
    slope = derivative(case, name[len(PREFIX) :], place)
    near = [abs(float(side[name].flatten()[place]) - slope) for side in (plain, other)]
    gap = float(difference.max())
    return near[0] <= AGREES * gap < near[1]


def derivative(case: Case, parameter: str, place: int) -> float:
    """Returns the central difference of the loss at one element of ``parameter``."""
    model: Any = dataclasses.replace(case, dtype=torch.float64).model(train=True)
    flat = dict(model.named_parameters())[parameter].data.view(-1)
    tokens = case.tokens()
    values = []
    for step in (STEP, -2 * STEP):
        flat[place] += step
        with torch.no_grad():
            values.append(float(model(input_ids=tokens, labels=tokens, use_cache=False).loss))
    return (values[0] - values[1]) / (2 * STEP)


@torch.no_grad()
def smooth(parameter: torch.Tensor, loss: Callable[[], Any]) -> Optional[bool]:
    """Whether a change of ``parameter`` changes the loss smoothly: halving the change halves the
    effect, which a switch (another expert is chosen) does not do. None if it changes nothing."""
    generator = torch.Generator().manual_seed(0)
    move = STEP * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    values = [float(loss())]
    for _ in range(2):
        parameter.add_(move)
        values.append(float(loss()))
    first, both = values[1] - values[0], values[2] - values[0]
    if first == both == 0.0:
        return None
    return abs(first) > 1e-5 and 1.8 < both / first < 2.2
