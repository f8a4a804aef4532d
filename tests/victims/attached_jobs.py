"""Jobs that run without moediag and that ``attach`` looks at: ``torchrun … attached_jobs.py NAME
FILE``. Those that can end do so once FILE exists. Nothing sleeps longer than a moment."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Told = Callable[[], bool]


def condition(rank: int, told: Told) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # HERE
    dist.barrier()


def computes(rank: int, told: Told) -> None:
    step = 0
    while True:
        step += 1
        value = torch.randn(200, 200) @ torch.randn(200, 200)
        ends = torch.tensor([float(told())])
        dist.all_reduce(ends, dist.ReduceOp.MIN)
        dist.all_reduce(value)
        if ends.item():
            break


def saves(rank: int, told: Told) -> None:
    if rank == 0:
        path = Path(f"{sys.argv[2]}.checkpoint")
        with path.open("wb") as file:
            while not told():
                file.write(bytes(1 << 17))
                file.flush()
                time.sleep(0.02)
        path.unlink()
    dist.barrier()


def stopped(rank: int, told: Told) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # HERE
    dist.barrier()


def locked(rank: int, told: Told) -> None:
    with Path(f"{sys.argv[2]}.lock").open("w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if rank == 1:
            fcntl.flock(file, fcntl.LOCK_EX)  # HERE
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    end = Path(sys.argv[2])
    globals()[sys.argv[1]](rank, end.exists)
    # One write: the ranks share the pipe, and `print` may write its newline separately.
    os.write(1, f"rank {rank} is done\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
