"""Under torchrun on gloo: rank 2 never comes to an all-gather in which the others wait. Then
every rank writes its Flight Recorder dump, with stacks, into the given folder, and all end when all
are written."""

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

TURN = 0.05  # seconds between two looks
LEFT_OUT = "left-out"  # a file: rank 2 has left the others


def records() -> bytes:
    c10d = torch._C._distributed_c10d
    return c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)


def finished() -> bytes:
    """The records of a rank whose last operation is complete; gloo records that slightly later."""
    while True:
        raw = records()
        if pickle.loads(raw)["entries"][-1]["retired"]:
            return raw
        time.sleep(TURN)


def waiting(folder: Path) -> bytes:
    """The records of a rank in the all-gather without rank 2."""
    while True:
        # Rank 2 left after an all-reduce of everyone's, so an earlier all-gather is not the last.
        left_out = (folder / LEFT_OUT).exists()
        raw = records()
        if left_out and "gather" in pickle.loads(raw)["entries"][-1]["profiling_name"]:
            return raw
        time.sleep(TURN)


def leave(folder: Path, raw: bytes) -> None:
    part = folder / f"{dist.get_rank()}.part"
    part.write_bytes(raw)
    part.rename(folder / f"trace_rank_{dist.get_rank()}")
    while len(list(folder.glob("trace_rank_*"))) < dist.get_world_size():
        time.sleep(TURN)
    os._exit(0)


def step(number: int, folder: Path) -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    if dist.get_rank() == 2 and number == 1:
        (folder / LEFT_OUT).touch()
        leave(folder, finished())
    dist.all_gather([torch.empty(8) for _ in range(dist.get_world_size())], tensor)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_rank() != 2:
        threading.Thread(target=lambda: leave(folder, waiting(folder)), daemon=True).start()
    try:
        for number in range(3):
            step(number, folder)
    finally:
        threading.Event().wait()  # a peer that has ended is no failure of this one


main()
