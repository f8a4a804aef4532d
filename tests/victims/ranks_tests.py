"""Tests on several ranks, run by tests/e2e/test_ranks_mark.py: four that are right, one whose rank
1 is wrong, one that hangs, one with a broken law, one that ends too late, one that only sleeps."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def rank() -> Iterator[int]:
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_good(rank: int) -> None:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    assert total == 1


@pytest.mark.asyncio
@pytest.mark.ranks(2)
async def test_awaits(rank: int) -> None:
    test_good(rank)


@pytest.mark.ranks(2)
def test_forks(rank: int) -> None:
    dist.barrier()
    if not (child := os.fork()):
        print("words of a child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.ranks(2)
def test_wrong(rank: int) -> None:
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    assert rank == 0 or total == 3


@pytest.mark.ranks(2)
def test_hangs(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    dist.barrier()


def trains(rate: float) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.ranks(2, laws=True)
def test_keeps_the_laws(rank: int) -> None:
    torch.manual_seed(rank)
    trains(0.1)


@pytest.mark.ranks(2, laws=True)
def test_breaks_a_law(rank: int) -> None:
    torch.manual_seed(rank)
    trains(0.1 * (1 + rank))


@pytest.mark.ranks(2, timeout=15)
def test_never_ends(rank: int) -> None:
    while True:
        dist.barrier()


@pytest.mark.ranks(2)
def test_sleeps() -> None:
    rank = os.environ["RANK"]
    part = pathlib.Path(f"part-{rank}")
    part.write_text(str(os.getpid()))
    part.rename(f"pid-{rank}")
    time.sleep(3600)
