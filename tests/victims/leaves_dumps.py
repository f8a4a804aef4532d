"""Under torchrun on gloo: rank 2 skips a reduction and then sleeps; after a while every rank writes
its Flight Recorder dump, with stacks, into the folder that is given, and ends."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def dump_and_end(folder: str, rank: int) -> None:
    time.sleep(4)
    c10d = torch._C._distributed_c10d
    raw = c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    part = Path(folder, f"{rank}.part")
    part.write_bytes(raw)
    part.rename(part.with_name(f"trace_rank_{rank}"))
    time.sleep(2)
    os._exit(0)


def step(rank: int, number: int) -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    if rank == 2 and number == 1:
        time.sleep(60)
    dist.broadcast(tensor, 0)  # where the others wait


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    threading.Thread(target=dump_and_end, args=(sys.argv[1], rank), daemon=True).start()
    for number in range(3):
        step(rank, number)


main()
