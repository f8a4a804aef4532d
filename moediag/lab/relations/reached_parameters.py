"""Every trainable parameter gets a gradient."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from moediag.lab.relations import numerical
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
        """Whether the loss depends smoothly on an unreached parameter."""
        for name in wrong:
            model: Any = case.model(train=True)
            parameter = dict(model.named_parameters())[name]
            if numerical.smooth(parameter, lambda: _loss(case, model)):  # noqa: B023
                return True
        return False


def _loss(case: Case, model: Any) -> Any:
    tokens = case.tokens(ROWS, LENGTH)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
