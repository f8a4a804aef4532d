"""FSDP2's own switch: parameters without a gradient enter the reduction as zeros.

Cost: a zero buffer for each unused parameter, nothing on a healthy step. Limits (measured): where
each expert is an FSDP group of its own the all-gathers differ as well, and it does not help; with
bf16 parameters, fp32 reduction and accumulation without sync its zeros have another dtype than
the accumulated gradients, and FSDP2 refuses.
"""

from __future__ import annotations

from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "FSDPModule.set_reduce_scatter_unused_params(True)"
SOURCE = "torch.distributed.fsdp.FSDPModule, in torch 2.13"


def after_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    switch = getattr(model, "set_reduce_scatter_unused_params", None)
    if switch is None:
        raise NotApplicable(
            "set_reduce_scatter_unused_params needs FSDP2 of a torch that has it (2.13 does)"
        )
    switch(True)
