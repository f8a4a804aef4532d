"""The gradient is the derivative of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Sequence

import torch

from moediag.lab.relations import numerical
from moediag.lab.relations.relation import Case, Relation, Tensors

AGREES = 0.01  # of the gradient: a fifth of what Directional allows


class Directional(Relation):
    name = "gradient"
    says = "backward gives each parameter the derivative of the loss"
    floor = 0.05  # of finite differences: families compute parts in fp32 also in float64
    route = "finite differences along another direction"

    def ways(self, case: Case) -> Sequence[str]:
        return ("backward",)

    def plain(self, case: Case, way: str) -> Tensors:
        """Returns, by parameter, the change of the loss along the gradient, or along a random
        direction if there is no gradient."""
        model = _wide(case)
        found = _gradients(case, model)
        return {
            name: torch.tensor(_slope(case, model, name, gradient, _direction(gradient)))
            for name, gradient in found.items()
        }

    def other(self, case: Case, way: str) -> Tensors:
        found = _gradients(case, _wide(case))
        return {name: (gradient * _direction(gradient)).sum() for name, gradient in found.items()}

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        model = _wide(case)
        gradient = _gradients(case, model)[wrong[0]]
        direction = _direction(torch.zeros_like(gradient))
        slope = _slope(case, model, wrong[0], gradient, direction)
        return abs(slope - float((gradient * direction).sum())) > max(
            self.floor * abs(slope), numerical.NOISE
        )


def _wide(case: Case) -> Any:
    return dataclasses.replace(case, dtype=torch.float64).model(train=True)


def _gradients(case: Case, model: Any) -> Dict[str, torch.Tensor]:
    _loss(case, model).backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.detach() for n, p in trained}


def _loss(case: Case, model: Any) -> Any:
    tokens = case.tokens()
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _direction(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.any():
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
    return gradient / gradient.norm()


def _rounding(values: Sequence[float]) -> float:
    """Returns how far two losses may be wrong together, which are computed in fp32."""
    return torch.finfo(torch.float32).eps * max(map(abs, values))


@torch.no_grad()
def _slope(
    case: Case, model: Any, name: str, gradient: torch.Tensor, direction: torch.Tensor
) -> float:
    """Returns the central difference along ``direction``. Of several steps the first that agrees
    with the gradient, else the one that does best: another may cross a point where the router
    chooses other experts."""
    parameter = dict(model.named_parameters())[name]
    wanted = float((gradient * direction).sum())
    slopes = []
    for step in numerical.STEPS:
        values = []
        for move in (step, -2 * step):
            parameter.add_(move * direction)
            values.append(float(_loss(case, model)))
        parameter.add_(step * direction)
        slopes.append((values[0] - values[1]) / (2 * step))
        if abs(slopes[-1] - wanted) <= AGREES * abs(wanted):
            break
        if step == max(numerical.STEPS) and abs(slopes[-1] - wanted) <= _rounding(values) / step:
            return wanted
    return min(slopes, key=lambda slope: abs(slope - wanted))
