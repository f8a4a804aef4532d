"""Modules with parameters of another dtype than the model's are FSDP2 units of their own."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moediag.axes import DP_SHARD
from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "fully_shard each module that has parameters of another dtype, before its layer"
SOURCE = "https://github.com/pytorch/pytorch/issues/156784"


def before_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    if wrapper.kind != "fsdp2":
        raise NotApplicable(f"it calls fully_shard, and wrapper {wrapper.kind} shards otherwise")
    from torch.distributed.fsdp import fully_shard

    first = next(model.parameters())
    ranks = (dist.get_world_size(),)
    mesh = init_device_mesh(first.device.type, ranks, mesh_dim_names=(str(DP_SHARD),))
    for module in list(model.modules()):
        if any(p.dtype is not first.dtype for p in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh, reshard_after_forward=wrapper.reshard_after_forward)
