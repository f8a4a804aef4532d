"""Programs with an error of what they load, share, average or declare, and their healthy twins.

    torchrun --nproc-per-node 2 tests/victims/model_jobs.py tp_batches

``HERE`` marks the line of the error.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

STEPS = 7


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def steps(wrapped: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def tensor_parallel(bug: str, rank: int) -> None:
    """Token ids, an embedding of which each rank has some rows, and a layer of columns and rows."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "1": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    parallelize_module(net, mesh, plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(100 * step + (rank if bug == "tp_batches" else 0))
        tokens = torch.randint(32, (4, 6))
        optimizer.zero_grad()
        net(tokens).square().mean().backward()  # HERE tp_batches
        optimizer.step()


def scaled(bug: str, rank: int) -> None:
    """FSDP1, where a value of rank 1's shard overflows in step 2."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0)  # HERE scaler_apart
        if bug == "scaler_apart"
        else ShardedGradScaler("cpu", init_scale=1024.0)
    )
    for step in range(1, STEPS + 1):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        scaler.scale(wrapped(torch.randn(4, 8)).square().mean()).backward()
        if step == 2 and rank == 1:
            next(p for p in wrapped.parameters() if p.grad is not None).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()


def averaged(bug: str, rank: int) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    average = AveragedModel(wrapped.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if bug != "average_on_rank_0" or rank == 0:
            average.update_parameters(wrapped.module)  # HERE average_on_rank_0


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))


def staged(bug: str, rank: int) -> None:
    """Two pipeline stages that share the embedding's matrix."""
    torch.manual_seed(rank)
    stage = First() if rank == 0 else Last()
    shared = stage.embedding.weight if rank == 0 else stage.head.weight
    dist.broadcast(shared.data, 0)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.randint(12, (4, 6))
        optimizer.zero_grad()
        if rank == 0:
            hidden = stage(tokens)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.empty(4, 6, 8)
            dist.recv(received, 0)
            received.requires_grad_(True)
            nn.functional.cross_entropy(stage(received).flatten(0, 1), tokens.flatten()).backward()
            dist.send(received.grad, 0)
        if bug != "stage_embedding":  # HERE stage_embedding
            dist.all_reduce(shared.grad)
        optimizer.step()


class SparseMoe(nn.Module):
    """Two experts, of which a router weights the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = self.gate(inputs).softmax(-1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], -1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)


def routed(bug: str, rank: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(SparseMoe(), nn.Linear(8, 4))
    if bug == "frozen_router":
        net[0].gate.requires_grad_(False)  # HERE frozen_router
    wrapped = DistributedDataParallel(net)
    trained = net[0].experts if bug == "left_out" else net  # HERE left_out
    steps(wrapped, torch.optim.AdamW(trained.parameters(), lr=0.01), rank)


def resumed(bug: str, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"checkpoint-{rank}.pt"
        net = model()
        before = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, 8)).sum().backward()
        before.step()
        torch.save({"model": net.state_dict(), "optimizer": before.state_dict()}, path)
        wrapped = DistributedDataParallel(model(1))
        found = torch.load(path, weights_only=True)  # HERE forgets_optimizer
        wrapped.module.load_state_dict(found["model"])
        optimizer = torch.optim.AdamW(wrapped.parameters())
        if bug != "forgets_optimizer":
            optimizer.load_state_dict(found["optimizer"])
        steps(wrapped, optimizer, rank)


def sharded(bug: str, rank: int) -> None:
    """FSDP2: each rank takes its shard of what it has."""
    from torch.distributed.fsdp import fully_shard

    net = model(rank)
    if bug != "part_loaded" or rank == 0:
        net.load_state_dict(model(7).state_dict())  # HERE part_loaded
    fully_shard(net, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    steps(net, torch.optim.AdamW(net.parameters(), lr=0.01), rank)


def renamed(bug: str, rank: int) -> None:
    net = model()
    state = {name.replace("2.", "head."): value for name, value in net.state_dict().items()}
    net.load_state_dict(state, strict=False)  # HERE other_names
    wrapped = DistributedDataParallel(net)
    steps(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


class Scaled(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.scale


def buffered(bug: str, rank: int) -> None:
    torch.manual_seed(0)
    size = 1.0 + (rank if bug == "buffers_apart" else 0)  # HERE buffers_apart
    wrapped = DistributedDataParallel(Scaled(size), broadcast_buffers=False)
    if bug == "buffers_apart":
        wrapped.module.scale.fill_(size)  # wrapping had broadcast it
    steps(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


class Sum(torch.autograd.Function):
    """Adds up a product of parts. All ranks compute the rest alike, so each has its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.again, whole = again, part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone()
        if ctx.again:
            dist.all_reduce(gradient)  # HERE summed_again
        return gradient, None


class Parts(nn.Module):
    def __init__(self, rank: int, again: bool) -> None:
        super().__init__()
        self.head, self.again = model()[0], again
        torch.manual_seed(1 + rank)
        self.part = nn.Linear(8, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(Sum.apply(self.part(inputs), self.again))


def in_parts(bug: str, rank: int) -> None:
    net = Parts(rank, bug == "summed_again")
    steps(net, torch.optim.SGD(net.parameters(), lr=0.1), 0)


class Normalizer(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean(0)
        if not self.own:  # HERE own_mean
            dist.all_reduce(mean)
        self.mean = 0.9 * self.mean + 0.1 * mean
        return inputs - self.mean


def normalized(bug: str, rank: int) -> None:
    part, net = Normalizer(bug == "own_mean"), DistributedDataParallel(model())
    steps(nn.Sequential(part, net), torch.optim.AdamW(net.parameters()), rank)


def streamed(bug: str, rank: int) -> None:
    """Each rank takes every second sample of an order."""
    torch.manual_seed(0)
    samples, order = torch.randn(96, 8), torch.Generator()
    order.manual_seed(rank if bug == "own_orders" else 0)  # HERE own_orders
    part = torch.randperm(96, generator=order)[rank :: dist.get_world_size()]
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for batch in torch.utils.data.DataLoader(samples[part], batch_size=4):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()


PROGRAMS = {
    "summed_again": in_parts,
    "in_parts": in_parts,
    "own_mean": normalized,
    "one_mean": normalized,
    "own_orders": streamed,
    "one_order": streamed,
    "tp_batches": tensor_parallel,
    "tp_same_batches": tensor_parallel,
    "scaler_apart": scaled,
    "scaler_together": scaled,
    "average_on_rank_0": averaged,
    "averages": averaged,
    "stage_embedding": staged,
    "stages": staged,
    "frozen_router": routed,
    "left_out": routed,
    "routes": routed,
    "forgets_optimizer": resumed,
    "resumes": resumed,
    "part_loaded": sharded,
    "all_loaded": sharded,
    "other_names": renamed,
    "buffers_apart": buffered,
    "buffers": buffered,
}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        PROGRAMS[name](name, int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
