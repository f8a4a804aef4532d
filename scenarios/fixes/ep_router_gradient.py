"""The router's gradient is summed over the ep axis before its scores are masked.

transformers 5.7 to 5.16 zero the scores of the experts that other ranks hold, and sum the scores'
gradient over the ranks only behind that mask, whose backward throws the others' part away again:
on each rank the router learns from its own experts alone, and so do all layers before it. The sum
in front of the mask, as in transformers 5.17, is exact: each score has exactly one owner.

Cost: one all-reduce of (tokens, top-k) per MoE layer in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "all-reduce the gradient of the router's scores over the ep axis before the mask"
SOURCE = "transformers 5.17, EpRouterParallel.transform_output_post_forward"


def before_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    for block in anatomy.blocks:
        router: Any = getattr(block.module, "gate", getattr(block.module, "router", None))
        mesh = getattr(router, "_hf_device_mesh", None)
        if mesh is None:
            raise NotApplicable(
                f"the router of {block.fqn} carries no device mesh: it is not divided by "
                "transformers 5.7 to 5.15"
            )
        # transformers' own hook masks; a prepended one runs before it.
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        router.register_forward_hook(_summing(group), prepend=True)


def _summing(group: Any) -> Any:
    def hook(router: nn.Module, args: Any, output: Any) -> Any:
        logits, scores, *rest = output
        if torch.is_grad_enabled() and scores.requires_grad:
            scores = _SumGradient.apply(scores, group)
        return (logits, scores, *rest)

    return hook


class _SumGradient(torch.autograd.Function):
    """The identity, with its gradient summed over a process group."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return scores.view_as(scores)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None
