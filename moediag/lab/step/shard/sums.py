"""A sum over ranks, and a copy on all of them: the gradient of one is the other."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist


def summed(part: torch.Tensor, group: Optional[Any] = None) -> torch.Tensor:
    """Returns the sum of ``part`` over ``group``; None: over all ranks."""
    result: torch.Tensor = _Summed.apply(part, group)
    return result


def copied(tensor: torch.Tensor, group: Optional[Any] = None) -> torch.Tensor:
    """Returns ``tensor``, which is equal on all ranks. Its gradient is summed over ``group``."""
    result: torch.Tensor = _Copied.apply(tensor, group)
    return result


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Optional[Any]) -> torch.Tensor:
        return _reduced(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Optional[Any]) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _reduced(gradient, ctx.group), None


def _reduced(part: torch.Tensor, group: Optional[Any]) -> torch.Tensor:
    total = part.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
