"""Ways to bring full weights into a sharded model, each written down once.

A method's ``load`` is the whole load: rank 0 has all weights (``job.source``), every rank ends with
its shard in ``job.model``. ``communicate`` issues the same collectives alone, on buffers that
exist. Where torch or accelerate has the method, theirs is called.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.worker.tasks.load_model import cut


class Missing(Exception):
    """This stack lacks the method; says what exactly."""


class Job:
    """One load into ``model``, whose parameters are DTensors on the meta device, Shard(0).
    ``weights``: name -> full tensor, what rank 0 loads; the other ranks may take shapes only, but
    for the method whose premise is that every rank has it all."""

    def __init__(
        self,
        model: nn.Module,
        weights: Dict[str, torch.Tensor],
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
    def targets(self) -> Dict[str, Any]:
        """Asked for inside the load, as accelerate's and torch's functions do."""
        return dict(self.model.state_dict())

    @property
    def source(self) -> Optional[Dict[str, torch.Tensor]]:
        """What a checkpoint reader has in hand on this rank: everything on rank 0, else nothing."""
        return {name: self.weights[name] for name in self.targets} if self.rank == 0 else None

    def full(self, name: str) -> torch.Tensor:
        """Rank 0's tensor, on others an uninitialised one of its size to receive it."""
        if self.rank == 0:
            return self.weights[name]
        target = self.targets[name]
        return torch.empty(target.size(), dtype=target.dtype, device=self.device)

    def shard(self, name: str, full: torch.Tensor) -> Any:
        """This rank's cut of ``full`` as a DTensor with memory of its own, as torch's own
        state-dict loading makes it."""
        from torch.distributed.tensor import DTensor

        target = self.targets[name]
        return DTensor.from_local(
            cut(full, self.rank, self.world_size).clone(), self.mesh, target.placements,
            run_check=False, shape=target.size(), stride=target.stride(),
        )  # fmt: skip

    def assign(self, shards: Dict[str, Any]) -> None:
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
    """The first write to new memory costs page faults, which are no communication."""
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


def buckets(sizes: Sequence[Tuple[str, torch.dtype, int]], limit: int) -> List[List[str]]:
    """``sizes``: name, dtype, bytes of each parameter in order -> names per broadcast: of one dtype
    and at most ``limit`` bytes, except a parameter that alone is larger."""
    done: List[List[str]] = []
    filling: Dict[torch.dtype, Tuple[List[str], int]] = {}
    for name, dtype, size in sizes:
        names, used = filling.get(dtype, ([], 0))
        if not names or used + size > limit:
            names, used = [], 0
            done.append(names)
        names.append(name)
        filling[dtype] = names, used + size
    return done


def _buckets(job: Job) -> List[List[str]]:
    sizes = [(name, t.dtype, t.numel() * t.element_size()) for name, t in job.targets.items()]
    return buckets(sizes, job.bucket_bytes)


def _flat(job: Job, names: Sequence[str]) -> torch.Tensor:
    """The bucket as one vector: rank 0's parameters end to end, on others room for them."""
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
    calls: List[Tuple[torch.Tensor, Optional[List[torch.Tensor]]]] = []
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
    """accelerate's: each full tensor goes to everybody, then its parts go out once more."""
    first, second = broadcasts(job), scatters(job)

    def communicate() -> None:
        first()
        second()

    return communicate


def local(job: Job) -> None:
    from torch.distributed.tensor import distribute_tensor

    if "src_data_rank" not in inspect.signature(distribute_tensor).parameters:
        raise Missing("distribute_tensor without src_data_rank")
    options: Dict[str, Any] = {"src_data_rank": None}
    job.assign(
        {
            name: distribute_tensor(job.weights[name], job.mesh, target.placements, **options)
            for name, target in job.targets.items()
        }
    )


Load = Callable[[Job], None]
Communicate = Callable[[Job], Callable[[], None]]

# The names are those of moediag.protocol.LOAD_METHODS.
METHODS: Dict[str, Tuple[Load, Optional[Communicate]]] = {
    "per-parameter": (per_parameter, broadcasts),
    "accelerate": (accelerate, broadcasts_and_scatters),
    "coalesced": (coalesced, bucket_broadcasts),
    "torch": (torch_broadcast, None),  # as per-parameter, and one of a pickled list before
    "scatter": (scatter, scatters),
    "local": (local, None),  # none at all
}
