"""The experts function that transformers calls for ``experts_implementation: triton``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from moediag.lab.step.kernels import grouped


def forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Returns (tokens, hidden) in hidden_states' type. ``self``: an experts module of transformers
    >= 5.0; hidden_states (tokens, hidden); top_k_index (tokens, top_k) int64, where ``num_experts``
    and above means an expert of another rank; top_k_weights (tokens, top_k).

    The slot of another rank's expert is an exact zero, so neither the sum nor the gradient of its
    weight needs a mask.
    """
    tokens, top_k = top_k_index.shape
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    every = torch.arange(self.num_experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(chosen, every, right=True)
    across = bool(getattr(self, "is_transposed", False))
    gated = bool(getattr(self, "has_gate", True))

    first = "gate_up_proj" if gated else "up_proj"
    x = hidden_states[order // top_k]
    groups = grouped.groups_for(x, offsets)
    x = grouped.linear(x, getattr(self, first), groups, across)
    x = _biased(x, _bias(self, first), chosen)
    x = self._apply_gate(x) if gated else self.act_fn(x)
    x = grouped.linear(x, self.down_proj, groups, across)
    x = _biased(x, _bias(self, "down_proj"), chosen)

    weighted = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    summed = weighted[back].view(tokens, top_k, -1).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _bias(module: Any, name: str) -> Optional[torch.Tensor]:
    return getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None


def _biased(x: torch.Tensor, bias: Optional[torch.Tensor], chosen: torch.Tensor) -> torch.Tensor:
    """Adds ``bias`` (experts, width). Rows of no expert stay zero."""
    if bias is None:
        return x
    foreign = (chosen >= bias.shape[0]).unsqueeze(-1)
    return x + bias[chosen.clamp(max=bias.shape[0] - 1)].masked_fill(foreign, 0.0)
