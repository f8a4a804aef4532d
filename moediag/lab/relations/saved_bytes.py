"""A saved model loads with the bytes that were saved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors
from moediag.lab.step.models import checkpoint
from moediag.lab.step.models.release_families import from_pretrained

SHARD = "40KB"  # of a sharded checkpoint: several files for a tiny model


class SavedBytes(Relation):
    name = "save-and-load"
    says = "save_pretrained and from_pretrained give back every saved tensor, byte by byte"
    exact = True
    route = "the loaded model computes other outputs"

    def ways(self, case: Case) -> Sequence[str]:
        return ("whole", "sharded", "bfloat16", "base-model")

    def plain(self, case: Case, way: str) -> Tensors:
        return _state(_model(case, way))

    def other(self, case: Case, way: str) -> Tensors:
        return _state(loaded(_model(case, way), way))

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        model = _model(case, way)
        tokens = case.tokens()
        with torch.no_grad():
            before, after = (_output(m, tokens) for m in (model, loaded(model, way)))
        return not torch.equal(before, after)


def _model(case: Case, way: str) -> Any:
    model: Any = case.model(buffers=True)
    if way == "bfloat16":
        model = model.bfloat16()
    return model.base_model if way == "base-model" else model


def loaded(model: Any, way: str) -> Any:
    """Returns what from_pretrained makes of a saved model, in the model's dtype."""
    options: Dict[str, Any] = {"max_shard_size": SHARD} if way == "sharded" else {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        if way == "sharded" and len(list(Path(folder).glob("*.safetensors"))) < 2:
            raise RuntimeError(f"save_pretrained wrote one file in spite of max_shard_size={SHARD}")
        dtype = {checkpoint.dtype_argument(): model.dtype}
        loaded = from_pretrained(type(model), type(model.config), folder, **dtype)
    return loaded.eval()


def _state(model: Any) -> Tensors:
    """Returns what a checkpoint has to hold. A loaded tensor may be kept in a wider dtype."""
    return {name: tensor.detach().clone().double() for name, tensor in model.state_dict().items()}


def _output(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=tokens, use_cache=False)[0]
    return found
