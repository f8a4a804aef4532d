"""What else is in the batch changes nothing."""

from __future__ import annotations

from typing import Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, differ, logits

ROWS = 3


class BatchOrder(Relation):
    name = "batch"
    says = "a row's logits do not depend on the order, number or content of the other rows"
    route = "other tokens in another row change this row's logits"

    def ways(self, case: Case) -> Sequence[str]:
        return ("reversed", "alone")

    @torch.no_grad()
    def plain(self, case: Case, way: str) -> Tensors:
        return {"logits": logits(case.model(), case.tokens(ROWS))}

    @torch.no_grad()
    def other(self, case: Case, way: str) -> Tensors:
        model, tokens = case.model(), case.tokens(ROWS)
        if way == "reversed":
            return {"logits": logits(model, tokens.flip(0)).flip(0)}
        return {"logits": torch.cat([logits(model, row[None]) for row in tokens])}

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model, tokens = case.model(), case.tokens(ROWS)
        changed = torch.cat([tokens[:1], case.tokens(ROWS - 1, name=1)])
        before, after = logits(model, tokens)[0], logits(model, changed)[0]
        return differ(before, after)
