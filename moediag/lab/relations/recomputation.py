"""Gradient checkpointing changes nothing."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from moediag.lab.relations import numerical
from moediag.lab.relations.relation import Case, Relation, Tensors, gradients
from moediag.recorder.not_applicable import NotApplicable


class Recomputation(Relation):
    name = "checkpointing"
    says = "gradient checkpointing changes neither the loss nor a gradient"
    route = "finite differences agree with the gradient without checkpointing"

    def ways(self, case: Case) -> Sequence[str]:
        model: Any = case.model()
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotApplicable("the model does not support gradient checkpointing")
        return ("non-reentrant", "reentrant")

    def plain(self, case: Case, way: str) -> Tensors:
        return _computed(case, "")

    def other(self, case: Case, way: str) -> Tensors:
        return _computed(case, way)

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        return numerical.sides_with_plain(case, wrong, _computed(case, ""), _computed(case, way))


def _computed(case: Case, way: str) -> Tensors:
    model: Any = case.model(train=True)
    if way:
        how = {"use_reentrant": way == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        if way == "reentrant":  # without it, no input of a checkpoint needs a gradient
            model.enable_input_require_grads()
    tokens = case.tokens()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}
