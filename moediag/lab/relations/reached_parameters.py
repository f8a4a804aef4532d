"""Every trainable parameter gets a gradient."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors

ROWS, LENGTH = 8, 16  # enough tokens for every expert


class ReachedParameters(Relation):
    name = "reached-parameters"
    says = "every trainable parameter gets a gradient"
    exact = True
    route = "the loss depends on the parameter"

    def ways(self, case: Case) -> Sequence[str]:
        return ("backward",)

    def plain(self, case: Case, way: str) -> Tensors:
        model = case.model(train=True)
        return {n: torch.ones(()) for n, p in model.named_parameters() if p.requires_grad}

    def other(self, case: Case, way: str) -> Tensors:
        model: Any = case.model(train=True)
        _loss(case, model).backward()
        return {
            name: torch.tensor(float(p.grad is not None and bool(p.grad.any())))
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        """Whether a change of the first unreached parameter changes the loss smoothly: halving the
        change halves the effect, which a switch (another expert is chosen) does not do."""
        for name in wrong:
            model: Any = case.model(train=True)
            parameter = dict(model.named_parameters())[name]
            move = 1e-3 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(0), dtype=parameter.dtype
            )
            values = [float(_loss(case, model))]
            for _ in range(2):
                parameter.add_(move)
                values.append(float(_loss(case, model)))
            first, both = values[1] - values[0], values[2] - values[0]
            if abs(first) > 1e-5 and 1.8 < both / first < 2.2:
                return True
        return False


def _loss(case: Case, model: Any) -> Any:
    tokens = case.tokens(ROWS, LENGTH)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
