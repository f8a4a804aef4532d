"""A loaded model trains the parameters that a new one trains."""

from __future__ import annotations

import tempfile
from typing import Any, Optional, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors
from moediag.lab.step.models import checkpoint
from moediag.lab.step.models.release_families import from_pretrained

FLAG = "requires_grad of "


class TrainableParameters(Relation):
    name = "trainable-parameters"
    says = "from_pretrained leaves each parameter trainable or frozen, as its class makes it"
    exact = True
    route = "autograd differentiates with respect to it in one of the two models only"

    def ways(self, case: Case) -> Sequence[str]:
        return ("from-pretrained",)

    def plain(self, case: Case, way: str) -> Tensors:
        return _trainable(case.model())

    def other(self, case: Case, way: str) -> Tensors:
        return _trainable(_loaded(case))

    def quantity(self, wrong: Sequence[str]) -> str:
        return "requires_grad"

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        tokens = case.tokens()
        kept, loaded = (
            [_differentiated(model, name[len(FLAG) :], tokens) for name in wrong]
            for model in (case.model(), _loaded(case))
        )
        return all(one != other for one, other in zip(kept, loaded))  # noqa: B905 - Python 3.9


def _loaded(case: Case) -> Any:
    model: Any = case.model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        dtype = {checkpoint.dtype_argument(): case.dtype}
        return from_pretrained(type(model), type(model.config), folder, **dtype)


def _trainable(model: Any) -> Tensors:
    """Returns 2 for a trainable parameter, 1 for a frozen one."""
    return {
        f"{FLAG}{name}": torch.tensor(1.0 + p.requires_grad) for name, p in model.named_parameters()
    }


def _differentiated(model: Any, name: str, tokens: torch.Tensor) -> bool:
    """Whether autograd accepts the parameter. It may find that the loss does not depend on it."""
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    try:
        torch.autograd.grad(loss, [dict(model.named_parameters())[name]], allow_unused=True)
    except RuntimeError:
        return False
    return True
