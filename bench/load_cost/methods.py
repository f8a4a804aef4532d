"""The ways to load full weights into a sharded model.

The first function of a method is the whole load: rank 0 starts with all weights (``job.source``),
and every rank ends with its shard in ``job.model``. The second issues the same collectives alone,
on buffers that exist. Where torch or accelerate implements the method, their function is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.load_cost.model import cut


class Missing(Exception):
    """The stack lacks the method; the message says what exactly."""


class Job:
    """One load into ``model``, whose parameters are DTensors on the meta device, Shard(0).

    ``weights`` maps each name to the full tensor that rank 0 loads. Other ranks may read its shape
    only, except in the method that assumes that every rank has all weights.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, torch.Tensor],
        mesh: DeviceMesh,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self.model = model
        self.weights = weights
        self.mesh = mesh
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.rank = mesh.get_local_rank()
        self.world_size = mesh.size()

    @functools.cached_property
    def targets(self) -> dict[str, Any]:
        """The model's state dict, read inside the load as accelerate's and torch's functions do."""
        return dict(self.model.state_dict())

    @property
    def source(self) -> dict[str, torch.Tensor] | None:
        """All weights on rank 0, None elsewhere."""
        return {name: self.weights[name] for name in self.targets} if self.rank == 0 else None

    def full(self, name: str) -> torch.Tensor:
        """The full tensor on rank 0; elsewhere an uninitialised one of its size to receive it."""
        if self.rank == 0:
            return self.weights[name]
        target = self.targets[name]
        return torch.empty(target.size(), dtype=target.dtype, device=self.device)

    def shard(self, name: str, full: torch.Tensor) -> Any:
        """This rank's cut of ``full`` as a DTensor with its own memory."""
        from torch.distributed.tensor import DTensor

        target = self.targets[name]
        return DTensor.from_local(
            cut(full, self.rank, self.world_size).clone(), self.mesh, target.placements,
            run_check=False, shape=target.size(), stride=target.stride(),
        )  # fmt: skip

    def assign(self, shards: dict[str, Any]) -> None:
        self.model.load_state_dict(shards, assign=True)


# ------------------------------------------------------------------------ one by one


def per_parameter(job: Job) -> None:
    shards = {}
    for name in job.targets:
        full = job.full(name)
        dist.broadcast(full, src=0)
        shards[name] = job.shard(name, full)
    job.assign(shards)


def broadcasts(job: Job) -> Callable[[], None]:
    buffers = [job.full(name) for name in job.targets]
    _touch(job, buffers)

    def communicate() -> None:
        for buffer in buffers:
            dist.broadcast(buffer, src=0)

    return communicate


def _touch(job: Job, buffers: Sequence[torch.Tensor]) -> None:
    """Writes to new memory once, so that its page faults are not counted as communication."""
    if job.rank:
        for buffer in buffers:
            buffer.fill_(1)


def accelerate(job: Job) -> None:
    try:
        from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    except ImportError as error:
        raise Missing(f"accelerate without fsdp2_load_full_state_dict ({error})") from error
    # All that the function asks of an Accelerator.
    accelerator = SimpleNamespace(is_main_process=job.rank == 0)
    fsdp2_load_full_state_dict(accelerator, job.model, job.source or {})


def torch_broadcast(job: Job) -> None:
    try:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    except (ImportError, TypeError) as error:
        raise Missing(f"StateDictOptions without broadcast_from_rank0 ({error})") from error
    set_model_state_dict(job.model, job.source or {}, options=options)


# ------------------------------------------------------------------------ coalesced


def buckets(sizes: Sequence[tuple[str, torch.dtype, int]], limit: int) -> list[list[str]]:
    """Names per broadcast, from (name, dtype, bytes) of each parameter in order.

    A bucket has one dtype and at most ``limit`` bytes, except one parameter that alone is larger.
    """
    done: list[list[str]] = []
    filling: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, dtype, size in sizes:
        names, used = filling.get(dtype, ([], 0))
        if not names or used + size > limit:
            names, used = [], 0
            done.append(names)
        names.append(name)
        filling[dtype] = names, used + size
    return done


def _buckets(job: Job) -> list[list[str]]:
    sizes = [(name, t.dtype, t.numel() * t.element_size()) for name, t in job.targets.items()]
    return buckets(sizes, job.bucket_bytes)


def _flat(job: Job, names: Sequence[str]) -> torch.Tensor:
    """One vector for the bucket: rank 0's parameters end to end, elsewhere room for them."""
    if job.rank == 0:
        return torch.cat([job.weights[name].reshape(-1) for name in names])
    targets = [job.targets[name] for name in names]
    numel = sum(target.numel() for target in targets)
    return torch.empty(numel, dtype=targets[0].dtype, device=job.device)


def coalesced(job: Job) -> None:
    shards = {}
    for names in _buckets(job):
        flat = _flat(job, names)
        dist.broadcast(flat, src=0)
        start = 0
        for name in names:
            target = job.targets[name]
            end = start + target.numel()
            shards[name] = job.shard(name, flat[start:end].view(target.size()))
            start = end
    job.assign(shards)


def bucket_broadcasts(job: Job) -> Callable[[], None]:
    flats = [_flat(job, names) for names in _buckets(job)]
    _touch(job, flats)

    def communicate() -> None:
        for flat in flats:
            dist.broadcast(flat, src=0)

    return communicate


# ------------------------------------------------------------------------ distribute_tensor


def scatter(job: Job) -> None:
    from torch.distributed.tensor import distribute_tensor

    job.assign(
        {
            name: distribute_tensor(job.full(name), job.mesh, target.placements)
            for name, target in job.targets.items()
        }
    )


def scatters(job: Job) -> Callable[[], None]:
    """One scatter of equal, padded parts per parameter, as ``distribute_tensor`` does."""
    calls: list[tuple[torch.Tensor, list[torch.Tensor] | None]] = []
    for target in job.targets.values():
        rows = -(-target.size(0) // job.world_size)
        parts = [
            torch.ones((rows, *target.size()[1:]), dtype=target.dtype, device=job.device)
            for _ in range(job.world_size if job.rank == 0 else 0)
        ]
        output = torch.ones((rows, *target.size()[1:]), dtype=target.dtype, device=job.device)
        calls.append((output, parts or None))

    def communicate() -> None:
        for output, parts in calls:
            dist.scatter(output, parts, src=0)

    return communicate


def broadcasts_and_scatters(job: Job) -> Callable[[], None]:
    """accelerate's collectives: broadcasts each full tensor, then scatters its parts as well."""
    first, second = broadcasts(job), scatters(job)

    def communicate() -> None:
        first()
        second()

    return communicate


def local(job: Job) -> None:
    from torch.distributed.tensor import distribute_tensor

    if "src_data_rank" not in inspect.signature(distribute_tensor).parameters:
        raise Missing("distribute_tensor without src_data_rank")
    options: dict[str, Any] = {"src_data_rank": None}
    job.assign(
        {
            name: distribute_tensor(job.weights[name], job.mesh, target.placements, **options)
            for name, target in job.targets.items()
        }
    )


Load = Callable[[Job], None]
Communicate = Callable[[Job], Callable[[], None]]

# The names are those of bench.load_cost.timing.METHODS.
METHODS: dict[str, tuple[Load, Communicate | None]] = {
    "per-parameter": (per_parameter, broadcasts),
    "accelerate": (accelerate, broadcasts_and_scatters),
    "coalesced": (coalesced, bucket_broadcasts),
    "torch": (torch_broadcast, None),  # those of per-parameter after one of a pickled list
    "scatter": (scatter, scatters),
    "local": (local, None),  # none at all
}
