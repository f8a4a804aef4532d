"""Eager attention and sdpa compute the same."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, differ, gradients
from moediag.recorder.not_applicable import NotApplicable


class AttentionImplementations(Relation):
    name = "attention-implementations"
    says = "sdpa gives the logits and gradients of eager attention"
    route = "they differ as much when an all-ones attention mask is passed"

    def ways(self, case: Case) -> Sequence[str]:
        model: Any = case.model()
        if not getattr(model, "_supports_sdpa", False):
            raise NotApplicable("the model does not support sdpa")
        return ("sdpa",)

    def plain(self, case: Case, way: str) -> Tensors:
        return _computed(case, "eager")

    def other(self, case: Case, way: str) -> Tensors:
        return _computed(case, way)

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        masked = {"attention_mask": torch.ones_like(case.tokens())}
        plain, other = (_computed(case, name, masked) for name in ("eager", way))
        return differ(plain[wrong[0]], other[wrong[0]])


def _computed(
    case: Case, implementation: str, inputs: Optional[Dict[str, torch.Tensor]] = None
) -> Tensors:
    model: Any = case.model(train=True, attn_implementation=implementation)
    tokens = case.tokens()
    found = model(input_ids=tokens, labels=tokens, use_cache=False, **(inputs or {}))
    found.loss.backward()
    return {"logits": found.logits.detach(), **gradients(model)}
