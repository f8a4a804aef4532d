"""Programs that train on, each with one silent error that a law finds, and their healthy twin.

    torchrun --nproc-per-node 2 tests/victims/law_jobs.py lr_by_rank

Several names, joined by commas, run one after the other. ``HERE`` marks the line of the error.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(bug: str, rank: int) -> None:
    """Data-parallel training on one labelled set of samples."""
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    part = {"num_replicas": 2, "rank": 0} if bug == "same_part" else {}  # HERE same_part
    sampler = None if bug == "no_sampler" else DistributedSampler(samples, **part)
    loader = DataLoader(samples, batch_size=8, sampler=sampler)  # HERE no_sampler
    wrapped = DistributedDataParallel(model())
    if bug == "load_on_rank_0" and rank == 0:
        torch.manual_seed(5)
        other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        wrapped.module.load_state_dict(other.state_dict())  # HERE load_on_rank_0
    lr = 1e-2 * (2 if bug == "lr_by_rank" and rank == 1 else 1)  # HERE lr_by_rank
    decay = 0.1 if bug == "decay_by_rank" and rank == 1 else 0.0  # HERE decay_by_rank
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, weight_decay=decay)
    done = 0
    for epoch in range(4):
        if sampler is not None and bug != "no_set_epoch":  # HERE no_set_epoch
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
            if bug == "extra_step" and rank == 1 and done == 3:
                optimizer.step()  # HERE extra_step
            done += 1
            if bug != "no_set_epoch" and done == STEPS:
                return


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and a head."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16).requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 4)
        self.cut = cut

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.base(inputs) + self.lora_B(self.lora_A(inputs))
        return self.head(hidden.detach() if self.cut else hidden)  # HERE adapters


def train_adapters(bug: str, rank: int) -> None:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(
        Adapted(bug == "adapters"), find_unused_parameters=bug == "adapters"
    )
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad])
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def train_shards(bug: str, rank: int) -> None:
    """FSDP1: each rank has a shard of every parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        (100 * wrapped(torch.randn(4, 8)).square().mean()).backward()
        if bug == "local_norms":
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)  # HERE local_norms
        else:
            wrapped.clip_grad_norm_(1.0)
        optimizer.step()


def train_two(bug: str, rank: int) -> None:
    """Healthy: a generator that runs first when the discriminator has stepped, and a copy of its
    weights on one rank."""
    critic, maker = DistributedDataParallel(model()), DistributedDataParallel(model())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (critic, maker)]
    average = copy.deepcopy(maker.module) if rank == 0 else None
    for step in range(3 * STEPS):
        torch.manual_seed(100 * step + rank)
        net, optimizer = (critic, maker)[step % 2], optimizers[step % 2]
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if average is not None:
            for kept, now in zip(average.parameters(), maker.module.parameters(), strict=True):
                kept.data.lerp_(now.data, 0.1)


def train_accumulating(bug: str, rank: int) -> None:
    """Healthy: four micro-batches a step, tied weights, batch norm, dropout, a scaler, evaluation
    on rank 0; ``checkpointed``: recomputed in the backward."""
    torch.manual_seed(0)
    tied = nn.Linear(8, 8)
    inner = nn.Sequential(tied, nn.BatchNorm1d(8), nn.Dropout(0.5), tied)
    wrapped = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        for part in range(4):
            context = wrapped.no_sync() if part < 3 else contextlib.nullcontext()
            with context:
                hidden = (
                    torch.utils.checkpoint.checkpoint(
                        wrapped, torch.randn(4, 8), use_reentrant=False
                    )
                    if bug == "checkpointed"
                    else wrapped(torch.randn(4, 8))
                )
                scaler.scale(hidden.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == 0 and step == 2:
            with torch.no_grad():
                wrapped.module(torch.randn(4, 8))


def train_locally(bug: str, rank: int) -> None:
    """Healthy: local SGD, averaged every third step."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        for parameter in wrapped.parameters() if step % 3 == 2 else ():
            dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
            parameter.data /= dist.get_world_size()


def train_joined(bug: str, rank: int) -> None:
    """Healthy: rank 1 has two batches more in each epoch."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for epoch in range(3):
        with wrapped.join():
            for step in range(4 + 2 * rank):
                torch.manual_seed(100 * step + 10 * rank + epoch)
                optimizer.zero_grad()
                wrapped(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()


def train_sharded(bug: str, rank: int) -> None:
    """FSDP2 with a replicate dimension, of a model that each rank initialises on its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(rank if bug == "own_seeds" else 0)  # HERE own_seeds
    wrapped = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(wrapped, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(inputs))  # HERE tp_dropout
        return inputs + self.down(torch.relu(self.up(hidden)))


def train_tensor_parallel(bug: str, rank: int) -> None:
    """Both ranks see the same batch; each has its own columns of ``up`` and rows of ``down``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    block = Block()
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    distribute_module(
        block.norm, mesh,
        input_fn=lambda _, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Replicate()]),),
        output_fn=lambda _, output, mesh: output.to_local(),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs = torch.randn(4, 8)
        torch.manual_seed(step + (rank if bug == "tp_dropout" else 0))
        optimizer.zero_grad()
        block(inputs).square().mean().backward()
        optimizer.step()


def train_to_nan(bug: str, rank: int) -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss = wrapped(torch.randn(4, 8)).square().mean()
        if step == 2:
            loss = loss * float("nan")  # HERE not_finite
        loss.backward()
        optimizer.step()


PROGRAMS = {
    "adapters": train_adapters,
    "adapters_healthy": train_adapters,
    "local_norms": train_shards,
    "shards_healthy": train_shards,
    "not_finite": train_to_nan,
    "two_optimizers": train_two,
    "accumulating": train_accumulating,
    "checkpointed": train_accumulating,
    "local_sgd": train_locally,
    "joined": train_joined,
    "own_seeds": train_sharded,
    "replicated_shards": train_sharded,
    "tp_dropout": train_tensor_parallel,
    "tensor_parallel": train_tensor_parallel,
}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for bug in sys.argv[1].split(","):
        PROGRAMS.get(bug, train)(bug, int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
