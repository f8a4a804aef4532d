"""Decoding with a cache computes what one forward does."""

from __future__ import annotations

import inspect
from typing import Any, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, alike, logits
from moediag.recorder.not_applicable import NotApplicable

LENGTH, FIRST = 12, 7
# Arguments, and fields of the output. Before 5.24 state space models have a name of their own.
_CACHES = ("cache", "past_key_values", "cache_params")


class CachedSteps(Relation):
    name = "use-cache"
    says = "use_cache gives the logits of one forward over all tokens"
    floor = 1e-3  # a recurrent layer adds up in another order, in fp32 also in a float64 model
    route = "a forward over the first tokens alone agrees with the one over all"

    def ways(self, case: Case) -> Sequence[str]:
        return ("token-by-token", "in-two-parts")

    @torch.no_grad()
    def plain(self, case: Case, way: str) -> Tensors:
        return {"logits": logits(case.model(), case.tokens(2, LENGTH))}

    @torch.no_grad()
    def other(self, case: Case, way: str) -> Tensors:
        model: Any = case.model()
        cache = next((n for n in _CACHES if n in inspect.signature(model.forward).parameters), None)
        if cache is None:
            raise NotApplicable("its forward takes no cache")
        tokens = case.tokens(2, LENGTH)
        found = model(input_ids=tokens[:, :FIRST], use_cache=True)
        parts = [found.logits]
        step = 1 if way == "token-by-token" else LENGTH - FIRST
        for start in range(FIRST, LENGTH, step):
            held = {cache: getattr(found, cache)}
            found = model(input_ids=tokens[:, start : start + step], use_cache=True, **held)
            parts.append(found.logits)
        return {"logits": torch.cat(parts, 1)}

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model, tokens = case.model(), case.tokens(2, LENGTH)
        whole = logits(model, tokens)
        for end in range(FIRST, LENGTH):
            alone = logits(model, tokens[:, :end])
            if not alike(alone, whole[:, :end], 1e-4):
                return False
        return True
