"""Splits a fused MoE block into experts as modules, of which only those with tokens run, as in
transformers 4.53 to 4.57. The fixes for starved experts need such a block, and newer releases have
none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.recorder.not_applicable import NotApplicable


class Expert(nn.Module):
    """gate_up (2 x width, hidden) and down (hidden, width), both taken over."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        gate, up = gate_up.detach().chunk(2, dim=0)
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (gate, up, down.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Returns (hidden states, router logits), as such blocks do."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.gate = _linear(fused.gate.weight.detach())
        pairs = zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(Expert(gate_up, down) for gate_up, down in pairs)
        self.top_k = int(fused.gate.top_k)
        self.norm_topk_prob = bool(fused.gate.norm_topk_prob)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, index = torch.topk(logits.softmax(dim=-1, dtype=torch.float), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(x)
        for number in index.unique().tolist():
            token, slot = torch.where(index == number)
            y = self.experts[number](x[token]) * weights[token, slot, None]
            result = result.index_add(0, token, y)
        return result.reshape(hidden_states.shape), logits


class First(nn.Module):
    """The block for releases whose blocks return only the hidden states."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(hidden_states)[0]
        return found


def take_apart(model: nn.Module, anatomy: Anatomy) -> None:
    """Splits the blocks in place; a model whose experts are modules does not change. Raises
    NotApplicable for any family but qwen3_moe of transformers >= 5."""
    if not anatomy.fused:
        return
    for block in anatomy.blocks:
        fused: Any = block.module
        if type(fused).__name__ != "Qwen3MoeSparseMoeBlock":
            raise NotApplicable(f"{type(fused).__name__} cannot be taken apart")
        parent, _, name = block.fqn.rpartition(".")
        setattr(model.get_submodule(parent), name, First(Block(fused)))


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.clone())
    return made
