"""All parameters get the dtype of the model, which is that of its first parameter."""

from __future__ import annotations

from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec

SUMMARY = "cast all parameters to the dtype of the model"
SOURCE = "model.to(torch.bfloat16), as in reports of mixed dtypes under FSDP2"


def before_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    dtype = next(model.parameters()).dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
