"""Every expert computes every token; unrouted tokens get weight zero.

The reports did this to be able to train. Right to rounding, and expensive: the
experts' work grows by number of experts / top-k.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "every expert computes every token, weighted by zero where it was not chosen"
SOURCE = "https://github.com/THUDM/slime/pull/1010 and other reports of hung Qwen3-MoE runs"


def before_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    if anatomy.fused:
        raise NotApplicable("all experts of this family are one parameter: none can be skipped")
    for block in anatomy.blocks:
        module = block.module
        if hasattr(module, "moe"):  # DeepSeek-V3, GLM-4: the gate returns indices and weights
            module.moe = MethodType(_moe, module)
        elif isinstance(getattr(module, "gate", None), nn.Linear):
            module.forward = MethodType(_forward, module)
        else:
            raise NotApplicable(f"dense experts are not written for {type(module).__name__}")


def _dense(block: Any, hidden: torch.Tensor, index: torch.Tensor, weight: Any) -> torch.Tensor:
    """Returns (tokens, hidden). hidden (tokens, hidden); index, weight (tokens, top_k)."""
    full = hidden.new_zeros(hidden.shape[0], len(block.experts)).scatter(
        1, index, weight.to(hidden.dtype)
    )
    return sum(expert(hidden) * full[:, i, None] for i, expert in enumerate(block.experts))


def _moe(self: Any, hidden_states: Any, topk_indices: Any, topk_weights: Any) -> Any:
    return _dense(self, hidden_states, topk_indices, topk_weights).type(hidden_states.dtype)


def _forward(self: Any, hidden_states: torch.Tensor) -> Any:
    shape = hidden_states.shape
    hidden = hidden_states.reshape(-1, shape[-1])
    logits = self.gate(hidden)
    weights = F.softmax(logits, dim=1, dtype=torch.float)
    weights, index = torch.topk(weights, self.top_k, dim=-1)
    # Mixtral always normalises and has no such attribute.
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    output = _dense(self, hidden, index, weights)
    if hasattr(self, "shared_expert"):  # Qwen2-MoE
        shared = self.shared_expert(hidden)
        output = output + torch.sigmoid(self.shared_expert_gate(hidden)) * shared
    return output.reshape(shape), logits
