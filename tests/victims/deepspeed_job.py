"""A mixture of experts under DeepSpeed's ZeRO: ``deepspeed deepspeed_job.py NAME STAGE``.

``clean``; ``skips``: rank 1 leaves the loop and blocks; ``extra``: rank 0 all-reduces once more.
A plain user program, except that DeepSpeed's shared-memory kernel is not compiled: an interrupted
build leaves a lock on which later starts wait forever.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

STEPS = 6


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(16, 16)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)  # GATHERS
        for expert in self.experts:
            hidden = hidden + expert(hidden)
        return self.head(hidden).pow(2).mean()


def block() -> None:
    """Waits forever."""
    fifo = Path(tempfile.mkdtemp()) / "never"
    os.mkfifo(fifo)
    fifo.read_bytes()  # BLOCKS


def main(name: str, stage: int) -> None:
    # `import deepspeed.comm.torch as …` would bind torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.manual_seed(0)
    model = Experts()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    for step in range(STEPS):
        if name == "skips" and step == 3 and dist.get_rank() == 1:
            block()
        engine.backward(engine(torch.randn(2, 16)))  # REDUCES
        if name == "extra" and step == 3 and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))  # EXTRA
        engine.step()


if __name__ == "__main__":
    numbers = [word for word in sys.argv[1:] if not word.startswith("-")]
    main(numbers[0], int(numbers[1]))
