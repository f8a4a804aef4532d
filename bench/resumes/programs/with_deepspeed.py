"""DeepSpeed's ``save_checkpoint`` and ``load_checkpoint``, in bfloat16 with main weights in float32
(ZeRO ``--stage``)."""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import parts
import torch
import torch.distributed as dist


def main(folder: Any, resume: bool, fault: str, stage: int) -> None:
    # An interrupted build of this kernel leaves a lock on which later starts wait forever.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = parts.Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": parts.ROWS,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
        },
    )
    data, made = parts.Rows(), 0
    if resume:
        _, client = engine.load_checkpoint(
            str(folder), "step-3",
            load_optimizer_states=fault not in ("moments-dropped", "main-lost"),
            load_lr_scheduler_states=fault != "scheduler-dropped",
        )  # fmt: skip
        made = client["made"]
        if fault != "generator-reset":
            torch.set_rng_state(client["torch"])
        if fault == "scheduler-ahead":
            scheduler.step()
    first = 0 if resume and fault == "sampler-restarted" else made
    for step in range(first, first + parts.STEPS - made):
        at = (step * world + rank) * parts.ROWS
        rows = torch.stack([data[n % len(data)] for n in range(at, at + parts.ROWS)]).bfloat16()
        engine.backward(parts.loss_of(engine(rows).float(), rows.float()))
        engine.step()
        made += 1
        if made == parts.SAVE_AT:
            client = {"made": made, "torch": torch.get_rng_state()}
            engine.save_checkpoint(str(folder), "step-3", client_state=client)
    dist.barrier()


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    typed = parts.given()
    main(typed.folder, typed.resume, typed.fault, typed.stage)
