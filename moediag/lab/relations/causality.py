"""A token does not see later ones."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, logits

LENGTH, SEEN = 12, 6


class Causality(Relation):
    name = "causality"
    says = "a token's logits do not depend on later tokens"
    route = "an earlier token's logits have a gradient with respect to a later token's embedding"

    def ways(self, case: Case) -> Sequence[str]:
        return ("other-later-tokens", "no-later-tokens")

    @torch.no_grad()
    def plain(self, case: Case, way: str) -> Tensors:
        return {"logits": logits(case.model(), case.tokens(2, LENGTH))[:, :SEEN]}

    @torch.no_grad()
    def other(self, case: Case, way: str) -> Tensors:
        tokens = case.tokens(2, LENGTH)[:, :SEEN]
        if way == "other-later-tokens":
            tokens = torch.cat([tokens, case.tokens(2, LENGTH - SEEN, name=1)], 1)
        return {"logits": logits(case.model(), tokens)[:, :SEEN]}

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model: Any = case.model()
        kept = []

        def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            output.requires_grad_()
            output.retain_grad()
            kept.append(output)
            return output

        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(keep)
        logits(model, case.tokens(2, LENGTH))[:, :SEEN].sum().backward()
        return bool(kept) and kept[0].grad is not None and bool(kept[0].grad[:, SEEN:].any())
