"""Every implementation of the experts computes the same."""

from __future__ import annotations

from typing import Any, Sequence

from moediag.lab.relations.relation import (
    EAGER,
    Case,
    Relation,
    Tensors,
    alike,
    gradients,
    many_experts,
)
from moediag.recorder.not_applicable import NotApplicable

OTHERS = ("batched_mm", "grouped_mm")
REPEATED = " one-token"  # one repeated token: all but top-k experts get nothing


class ExpertImplementations(Relation):
    name = "expert-implementations"
    says = "each experts_implementation gives the logits and gradients of the eager one"
    route = "the remaining implementation agrees with one of the two"

    def ways(self, case: Case) -> Sequence[str]:
        if not many_experts(case.family):
            raise NotApplicable("the model has one implementation of its experts")
        return tuple(f"{name}{tokens}" for name in OTHERS for tokens in ("", REPEATED))

    def plain(self, case: Case, way: str) -> Tensors:
        return _computed(case, EAGER, way.endswith(REPEATED))

    def other(self, case: Case, way: str) -> Tensors:
        return _computed(case, way.replace(REPEATED, ""), way.endswith(REPEATED))

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        third = next(name for name in OTHERS if name != way.replace(REPEATED, ""))
        one = way.endswith(REPEATED)
        sides = [_computed(case, name, one) for name in (EAGER, way.replace(REPEATED, ""))]
        found = _computed(case, third, one)
        return any(all(alike(side[n], found[n], 1e-5) for n in wrong) for side in sides)


def _computed(case: Case, implementation: str, one_token: bool) -> Tensors:
    model: Any = case.model(train=True, experts_implementation=implementation)
    tokens = case.tokens(2, 16)
    if one_token:
        tokens = tokens[:1, :1].expand(2, 16).contiguous()
    found = model(input_ids=tokens, labels=tokens, use_cache=False)
    found.loss.backward()
    return {"logits": found.logits.detach(), **gradients(model)}
