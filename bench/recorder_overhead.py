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

from moediag.lab.step import preparation, training
from moediag.lab.step.shard.wrapped import synchronize
from moediag.protocol import ENV_GUARD, ENV_LAWS, ModelSpec, SkewSpec, StepSpec, Trial
from moediag.recorder import install

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
    seconds = {"off": [], "on": [], "guard": [], "laws": [], "checked": []}
    folder = tempfile.mkdtemp()
    for number in range(int(sys.argv[2]) + 1):
        # Who goes first alternates, and round 0 warms up.
        for kind in ("off", "on", "guard", "laws")[:: 1 if number % 2 else -1]:
            os.environ[ENV_GUARD] = str(int(kind == "guard"))
            os.environ[ENV_LAWS] = "0" if kind == "laws" else ""
            recorder = install(folder, rank, world) if kind != "off" else None
            # The first forward under a fresh recorder finds the modules: not a cost per step.
            # Laws check the steps 1 to 3.
            for timed in ("", "checked", "", "laws") if kind == "laws" else ("", kind):
                synchronize()
                began = time.perf_counter()
                training.forward_backward(wrapped, rank, number + 1, device)
                training.finish(wrapped)
                synchronize()
                if timed and number:
                    seconds[timed].append(time.perf_counter() - began)
            if recorder is not None:
                recorder.uninstall()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
