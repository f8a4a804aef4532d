"""Padding changes no real token."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, accepts, differ, gradients

LENGTHS = (12, 7)  # of the two rows


class Padding(Relation):
    name = "padding"
    says = "padding under an attention mask changes no real token's logits and no gradient"
    route = "other tokens in the padding change a real token's logits"

    def ways(self, case: Case) -> Sequence[str]:
        return ("left", "right")

    def plain(self, case: Case, way: str) -> Tensors:
        model: Any = case.model(train=True)
        found: Tensors = {}
        for row, tokens in enumerate(_rows(case)):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            (logits * _weights(logits, row)).sum().backward()
            found[f"logits of row {row}"] = logits.detach()
        return {**found, **gradients(model)}

    def other(self, case: Case, way: str) -> Tensors:
        model: Any = case.model(train=True)
        inputs, places = _batch(case, way, 0)
        logits = _padded(model, inputs, way)
        found: Tensors = {}
        total = logits.new_zeros(())
        for row, place in enumerate(places):
            real = logits[row, place]
            total = total + (real * _weights(real, row)).sum()
            found[f"logits of row {row}"] = real.detach()
        total.backward()
        return {**found, **gradients(model)}

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model: Any = case.model(train=True)
        sides = []
        for name in (0, 1):
            inputs, places = _batch(case, way, name)
            sides.append(_padded(model, inputs, way)[1, places[1]])
        return differ(*sides)


def _rows(case: Case) -> Sequence[torch.Tensor]:
    return [case.tokens(1, length, name=row)[0] for row, length in enumerate(LENGTHS)]


def _weights(logits: torch.Tensor, row: int) -> torch.Tensor:
    """Returns fixed weights, so that a sum of logits has a gradient of every element."""
    generator = torch.Generator().manual_seed(row)
    return torch.randn(logits.shape, generator=generator).to(logits)


def _batch(case: Case, way: str, name: int) -> Tuple[Dict[str, torch.Tensor], Sequence[slice]]:
    """Returns the padded batch and the place of each row's real tokens. ``name``: of the tokens in
    the padding."""
    longest = max(LENGTHS)
    tokens = case.tokens(len(LENGTHS), longest, name=10 + name)
    mask = torch.zeros_like(tokens)
    places = []
    for row, real in enumerate(_rows(case)):
        start = longest - len(real) if way == "left" else 0
        place = slice(start, start + len(real))
        tokens[row, place], mask[row, place] = real, 1
        places.append(place)
    return {"input_ids": tokens, "attention_mask": mask}, places


def _padded(model: Any, inputs: Dict[str, torch.Tensor], way: str) -> torch.Tensor:
    """Passes positions that count real tokens only, as ``generate`` does."""
    if way == "left" and accepts(model, "position_ids"):
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        inputs = {**inputs, "position_ids": positions}
    found: torch.Tensor = model(**inputs, use_cache=False).logits
    return found
