"""Times the mid-size step with the recorder off, on, on with the guard, and on with laws (a step
that is checked, and one that is not), alternating in one group.

``torchrun --nproc-per-node 2 bench/recorder_overhead.py OUT.json ROUNDS``; rank 0 writes seconds.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.speed import recording
from moediag.lab.step import preparation, training
from moediag.lab.step.shard.wrapped import synchronize
from moediag.protocol import ModelSpec, SkewSpec, StepSpec, Trial

MODEL = ModelSpec(
    hidden=128, intermediate=256, layers=2, experts=16, heads=4, kv_heads=2, head_dim=32, vocab=512
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    trial = Trial(
        "bench",
        "bench",
        "bench",
        world_size=world,
        layout={"dp_shard": world},
        model=MODEL,
        step=StepSpec(seq_len=512),
        skew=SkewSpec(batches="identical"),
    )
    device = torch.device("cpu")
    wrapped = preparation.prepare(trial, device)

    def one() -> float:
        synchronize()
        began = time.perf_counter()
        training.forward_backward(wrapped, rank, 1, device)
        training.finish(wrapped)
        synchronize()
        return time.perf_counter() - began

    seconds = recording.in_turn(one, int(sys.argv[2]), tempfile.mkdtemp())
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
