"""Packed documents compute what each does alone."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, accepts, differ, logits
from moediag.recorder.not_applicable import NotApplicable

LENGTHS = (7, 9, 5)


class Packing(Relation):
    name = "packing"
    says = "documents packed into one row with restarting position_ids compute what each does alone"
    route = "other tokens in the first document change the second document's logits"

    def ways(self, case: Case) -> Sequence[str]:
        model: Any = case.model()
        if not accepts(model, "position_ids"):
            raise NotApplicable("its forward takes no position_ids")
        # Boundaries: what DataCollatorWithFlattening passes beside the positions if it is asked to.
        known = inspect.signature(model.forward).parameters.values()
        more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known)
        return ("position-ids", "boundaries") if more else ("position-ids",)

    @torch.no_grad()
    def plain(self, case: Case, way: str) -> Tensors:
        model = case.model()
        return {
            f"logits of document {i}": logits(model, tokens) for i, tokens in enumerate(_all(case))
        }

    @torch.no_grad()
    def other(self, case: Case, way: str) -> Tensors:
        return _packed(case.model(), _all(case), way)

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model, documents = case.model(), _all(case)
        changed = [case.tokens(1, LENGTHS[0], name=20), *documents[1:]]
        name = "logits of document 1"
        before, after = (_packed(model, d, way)[name] for d in (documents, changed))
        return differ(before, after)


def _all(case: Case) -> List[torch.Tensor]:
    return [case.tokens(1, length, name=i) for i, length in enumerate(LENGTHS)]


def _packed(model: Any, documents: List[torch.Tensor], way: str) -> Tensors:
    lengths = [d.shape[1] for d in documents]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    inputs: Dict[str, Any] = {"position_ids": positions}
    if way == "boundaries":
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
        inputs.update(
            cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(lengths),
            max_length_k=max(lengths), seq_idx=numbers.to(torch.int32),
        )  # fmt: skip
    found = logits(model, torch.cat(documents, 1), **inputs).split(lengths, 1)
    return {f"logits of document {i}": part for i, part in enumerate(found)}
