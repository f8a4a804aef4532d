"""Before each FSDP2 reduction, parameters without a gradient get a zero one.

The user-land form of ``set_reduce_scatter_unused_params`` for a torch that lacks it. It fills in
the dtype that the group's other gradients have, so that it also works where gradients were
accumulated in the reduction dtype without sync. Cost: the zeros, and their share of the
reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard.fsdp2_internals import parameter_groups
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "zero gradients for unused parameters, set in FSDP2's post-backward"
SOURCE = "the idea of pytorch's set_reduce_scatter_unused_params, from outside"


def after_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    groups = parameter_groups(model)
    if not groups:
        raise NotApplicable("zero-fill acts on FSDP2's post-backward; this wrapper has none")
    for group in groups:
        group.post_backward = _filling(group, group.post_backward)


def _filling(group: Any, original: Any) -> Any:
    def post_backward(*unused: Any) -> Any:
        if group.reduce_grads:
            _fill(group)
        return original(*unused)

    return post_backward


def _fill(group: Any) -> None:
    accumulated = any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)
    for p in group.fsdp_params:
        unsharded = getattr(p, "_unsharded_param", None)
        if unsharded is None or not unsharded.requires_grad:
            continue
        if _accumulates_in_place(p):
            if unsharded.grad is None:
                unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)
            continue
        if p.unsharded_accumulated_grad is not None:
            continue
        gradient = unsharded.grad if unsharded.grad is not None else torch.zeros_like(unsharded)
        if accumulated:
            # Also if the only gradient came in the last micro-batch, in the parameter's dtype.
            p.unsharded_accumulated_grad = gradient.to(p.reduce_dtype or unsharded.dtype)
            unsharded.grad = None
        else:
            unsharded.grad = gradient


def _accumulates_in_place(parameter: Any) -> bool:
    """Whether torch accumulates without sync in ``.grad`` itself and casts all dtypes to the
    reduction's when it copies (torch 2.15). Earlier releases have a second buffer in the reduction
    dtype."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)
