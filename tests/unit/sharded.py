"""Real DTensors of one rank of a simulated world, with a process group that does nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_count = itertools.count()


@contextlib.contextmanager
def rank_of(rank: int, *sizes: int) -> Iterator[DeviceMesh]:
    """The mesh of ``sizes`` as ``rank`` sees it. Its axes have new names each time, because torch
    keeps what it knows of a mesh by these and takes another rank's mesh for the same."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = 1
    for size in sizes:
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        number = next(_count)
        names = tuple(f"{axis}{number}" for axis in "xyz"[: len(sizes)])
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def numbered(*shape: int) -> torch.Tensor:
    """0, 1, 2, … in ``shape``: each element is its index in the whole tensor."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def fully_sharded(whole: Any, mesh: DeviceMesh) -> Any:
    """``whole`` (plain, or a DTensor of another axis) as fully_shard lays it on ``mesh``."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Module()
    module.weight = nn.Parameter(whole)
    fully_shard(module, mesh=mesh)
    return module.weight


def placed(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    """``whole`` as a DTensor of these placements. No communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
