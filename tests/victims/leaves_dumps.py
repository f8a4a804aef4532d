"""Under torchrun on gloo: rank 2 never comes to a broadcast that the others wait in. Once they do,
every rank writes its Flight Recorder dump, with stacks, into the folder that is given; all end when
all are written."""

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

TURN = 0.05  # seconds between two looks


def dump(folder: Path, rank: int) -> None:
    c10d = torch._C._distributed_c10d
    while True:
        raw = c10d._dump_fr_trace(
            includeCollectives=True, includeStackTraces=True, onlyActive=False
        )
        last = pickle.loads(raw)["entries"][-1]["profiling_name"]
        if rank == 2 or ("broadcast" in last and (folder / "left-out").exists()):
            break
        time.sleep(TURN)
    part = folder / f"{rank}.part"
    part.write_bytes(raw)
    part.rename(folder / f"trace_rank_{rank}")
    while len(list(folder.glob("trace_rank_*"))) < dist.get_world_size():
        time.sleep(TURN)
    (folder / "left-out").unlink(missing_ok=True)
    os._exit(0)


def step(rank: int, number: int, folder: Path) -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    if rank == 2 and number == 1:
        (folder / "left-out").touch()
        dump(folder, rank)
    dist.broadcast(tensor, 0)  # where the others wait


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    if rank != 2:
        threading.Thread(target=dump, args=(folder, rank), daemon=True).start()
    try:
        for number in range(3):
            step(rank, number, folder)
    finally:
        threading.Event().wait()  # a peer that has ended is no failure of this one


main()
