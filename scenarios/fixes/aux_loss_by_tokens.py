"""The auxiliary loss of a batch counts by the batch's share of the step's tokens.

A Trainer passes the number of tokens of all ranks and micro-batches, multiplies the model's loss by
the number of ranks, and does not divide it by the micro-batches. That is right for a sum over
tokens divided by that number. The model adds the auxiliary loss, a mean, as it is. Weighted here by
the batch's own tokens divided by the same number, it is a mean over ranks and micro-batches.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard.wrapped import ROUTER_LOGITS
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "weigh the auxiliary loss by the batch's share of the step's tokens"
SOURCE = "moediag; transformers #48706 removes the factor of the ranks alone"
_IGNORED = -100


def before_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    whole: Any = model
    if not getattr(whole.config, ROUTER_LOGITS, False):
        raise NotApplicable("the model adds no auxiliary loss")
    released = whole.forward

    # Trainer reads the signature of forward to decide which columns and arguments it passes.
    @functools.wraps(released)
    def forward(*args: Any, labels: Optional[torch.Tensor] = None, **kwargs: Any) -> Any:
        found = released(*args, labels=labels, **kwargs)
        every = kwargs.get("num_items_in_batch")
        if labels is not None and every is not None:
            share = (labels[..., 1:] != _IGNORED).sum() / every
            found.loss = found.loss + (share - 1) * whole.router_aux_loss_coef * found.aux_loss
        return found

    whole.forward = forward
