"""Every expert's parameters enter the graph through ``0 * p[0]``, added to the block's output.

Cost: one tiny operation per parameter, and a full-size zero gradient each in backward. Limits: an
inf or nan in the touched element poisons the output; where each expert is an FSDP group of its own
the parameter is sharded outside of the expert's forward and touching does not gather it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moediag.lab.step.models.tiny import Anatomy, add_to_output
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "add 0 * p[0] of every expert parameter to the output of its MoE block"
SOURCE = "a common workaround for unused parameters under data parallelism"


def after_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    if wrapper.granularity == "expert":
        raise NotApplicable(
            "touch reads expert parameters in the MoE block, where per-expert groups are sharded"
        )
    for block in anatomy.blocks:
        block.module.register_forward_hook(_touching)


def _touching(block: nn.Module, args: Any, output: Any) -> Any:
    experts: Any = block.experts
    touched = sum(p.reshape(-1)[0] for p in experts.parameters() if p.requires_grad)
    return add_to_output(output, 0.0 * touched)
