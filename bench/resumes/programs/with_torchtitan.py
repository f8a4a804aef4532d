"""torchtitan's ``Trainer`` with its checkpoints, which it resumes from by itself."""

from __future__ import annotations

from typing import Any

import parts
import titan_on_cpu
import torch.distributed as dist

EXCLUDED = {
    "moments-dropped": ["optimizer"],
    "scheduler-dropped": ["lr_scheduler"],
    "sampler-restarted": ["dataloader"],
}


def main(folder: Any, fault: str) -> None:
    config = titan_on_cpu.config(str(folder), parts.STEPS, parts.SAVE_AT, EXCLUDED.get(fault, []))
    trainer = config.build()
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    typed = parts.given()
    main(typed.folder, typed.fault)
