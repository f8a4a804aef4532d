"""Jobs with their tensors on a GPU, which the ranks share if there are fewer GPUs than ranks.

    torchrun --nproc-per-node 2 tests/victims/gpu_jobs.py BACKEND NAME FILE

``computes`` ends once FILE exists. Each rank makes FILE.RANK when it begins. ``HERE`` marks the
line of an error.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def condition(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1 << 22, device="cuda"))  # HERE
    dist.barrier()
    torch.cuda.synchronize()


def computes(rank: int) -> None:
    end, ends = Path(sys.argv[3]), torch.zeros(1, device="cuda")
    while not ends.item():
        square = torch.randn(2000, 2000, device="cuda")
        for _ in range(50):
            square = torch.tanh(square @ square)
        dist.all_reduce(square)
        ends.fill_(end.exists())
        dist.all_reduce(ends, dist.ReduceOp.MIN)


def trains(rank: int, overwrites: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        inputs = torch.randn(32, 64, device="cuda")
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        if overwrites and rank == 1 and step == 2:
            model[0].weight.data[0, 0] += 1.0  # HERE


def overwritten(rank: int) -> None:
    trains(rank, overwrites=True)


def evaluates_alone(rank: int) -> None:
    """Rank 0 evaluates without a model or a data loader that the recorder knows: nearly every look
    finds it at ``item``. Longer than the default patience."""
    if rank == 0:
        evaluate(45.0)
    dist.barrier()
    torch.cuda.synchronize()


def evaluates_while_the_others_reduce(rank: int) -> None:
    """The same, and on NCCL the other rank has issued its call and waits for its device, too."""
    if rank == 0:
        evaluate(20.0)
    loss = torch.ones(1 << 10, device="cuda")
    dist.all_reduce(loss)
    assert loss[0].item() == dist.get_world_size()


def evaluate(seconds: float) -> float:
    weight, score = torch.randn(2000, 2000, device="cuda"), 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rows = torch.randn(2000, 2000, device="cuda")
        for _ in range(20):
            rows = torch.tanh(rows @ weight)
        score += rows.mean().item()
    return score


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(sys.argv[1])
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    Path(f"{sys.argv[3]}.{dist.get_rank()}").touch()
    globals()[sys.argv[2]](dist.get_rank())
    sys.stdout.write(f"rank {dist.get_rank()} is done\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
