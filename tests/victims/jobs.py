"""Training jobs that go wrong, under any launcher: ``torchrun … jobs.py NAME``.

Plain programs of a user who never heard of moediag. The line that a diagnosis must name ends with
``# HERE``. Nothing sleeps to be slow: what must take long waits for a file or burns CPU time.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def clean(rank: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        step(model, optimizer)


def skips(rank: int) -> None:
    """Rank 1 leaves a reduction out, and waits where the others come only after it."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    loss = torch.ones(4)
    if rank != 1:
        dist.all_reduce(loss)  # HERE
    dist.barrier()


def raises(rank: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if rank == 1 and number == 2:
            raise ValueError("the batch is empty")  # HERE
        step(model, optimizer)


def main() -> None:
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
