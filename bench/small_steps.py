"""Times small steps with the recorder off and on, alternating in one group: a DDP step of about
1.7 ms, and an FSDP2 step of ten tiny layers with clipping and Adam. A DDP step of about
5 ms is timed with the recorder, and with laws, too. With ``BENCH_DEVICE=cuda`` all ranks compute on
one GPU, and NCCL has to be one that allows it.

``torchrun --nproc-per-node 2 bench/small_steps.py OUT.json ROUNDS``; rank 0 writes, by step and by
kind, the wall time and the CPU time of a step in each round.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moediag.protocol import ENV_LAWS
from moediag.recorder import install

DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
STEPS = 40  # of one round: a clock of the CPU is too coarse for one step
STEPS_OF_LAWS = 600  # of which 10 are checked
Step = Callable[[], None]


def ddp(width: int = 128, rows: int = 64) -> Step:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(rows, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2() -> Step:
    torch.manual_seed(0)
    layers = [
        torch.nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True)
        for _ in range(10)
    ]
    model = torch.nn.Sequential(torch.nn.Embedding(1024, 16), *layers, torch.nn.Linear(16, 1024))
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = torch.randint(0, 1024, (4, 16))

    def step() -> None:
        model(batch).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def settle() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def measured(step: Step, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step: of the clock, and of the CPU."""
    step()
    dist.barrier()
    settle()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    settle()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.cuda.set_device(0)
    torch.set_default_device(DEVICE)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make, kinds, steps in (
            ("ddp", ddp, ("off", "on"), STEPS),
            ("fsdp2", fsdp2, ("off", "on"), STEPS // 8),
            ("laws", lambda: ddp(192, 96), ("on", "laws"), STEPS_OF_LAWS),
        ):
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for number in range(int(sys.argv[2]) + 1):
                # Who goes first alternates, and round 0 warms up.
                for kind in list(times)[:: 1 if number % 2 else -1]:
                    os.environ[ENV_LAWS] = "0" if kind == "laws" else ""
                    on = kind != "off"
                    recorder = install(folder, rank, world, of_job=True) if on else None
                    # After it, as in a job: what exists before is not known to be wrapped.
                    seconds = measured(make(), steps)
                    if recorder is not None:
                        recorder.uninstall()
                    if number:
                        times[kind].append(seconds)
            found[name] = times
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
