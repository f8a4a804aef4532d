"""Gradient accumulation computes what one batch does."""

from __future__ import annotations

import inspect
from typing import Any, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, accepts, gradients
from moediag.recorder.not_applicable import NotApplicable

MICRO = 2  # micro-batches
WEIGHT = 1.0  # of the auxiliary loss


class Accumulation(Relation):
    name = "accumulation"
    says = "micro-batches with num_items_in_batch add up to the loss and gradients of one batch"
    route = "the loss of one batch is the cross entropy of its logits plus the auxiliary loss"

    def ways(self, case: Case) -> Sequence[str]:
        model: Any = case.model()
        known = inspect.signature(model.forward).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in known):
            raise NotApplicable("its forward takes no num_items_in_batch")
        routed = accepts(model, "output_router_logits") and _weight_fields(model)
        return ("cross-entropy", "auxiliary-loss") if routed else ("cross-entropy",)

    def plain(self, case: Case, way: str) -> Tensors:
        model = _model(case, way)
        loss = _loss(model, torch.cat([_micro(case)] * MICRO), way, _items(case)).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    def other(self, case: Case, way: str) -> Tensors:
        """The micro-batches are equal, so that a loss which is not a mean over tokens is too."""
        model = _model(case, way)
        losses = []
        for _ in range(MICRO):
            loss = _loss(model, _micro(case), way, _items(case)).loss
            loss.backward()
            losses.append(loss.detach())
        return {"loss": torch.stack(losses).sum(), **gradients(model)}

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model = _model(case, way)
        tokens = torch.cat([_micro(case)] * MICRO)
        found = _loss(model, tokens, way, _items(case))
        flat = found.logits[:, :-1].reshape(-1, found.logits.shape[-1]).float()
        wanted = torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))
        if way == "auxiliary-loss":
            wanted = wanted + WEIGHT * found.aux_loss
        return bool(torch.isclose(found.loss.float(), wanted.float(), rtol=1e-3))


def _model(case: Case, way: str) -> Any:
    model: Any = case.model(train=True)
    if way == "auxiliary-loss":
        for holder in (model, model.config):
            for name in _weight_fields(model):
                if hasattr(holder, name):
                    setattr(holder, name, WEIGHT)
    return model


def _weight_fields(model: Any) -> Sequence[str]:
    return [n for n in vars(model.config) if n.endswith("aux_loss_coef")]


def _micro(case: Case) -> torch.Tensor:
    return case.tokens(2, 10)


def _items(case: Case) -> torch.Tensor:
    return torch.tensor(MICRO * _micro(case)[:, 1:].numel())


def _loss(model: Any, tokens: torch.Tensor, way: str, items: torch.Tensor) -> Any:
    routed = {"output_router_logits": True} if way == "auxiliary-loss" else {}
    found = model(
        input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=items, **routed
    )
    if routed and getattr(found, "aux_loss", None) is None:
        raise NotApplicable("the model returns no aux_loss")
    return found
