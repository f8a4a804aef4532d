"""A training that saves and resumes, in one process or on ranks with DistributedDataParallel; each
fault is one line of it.

    python resumes.py FOLDER [--resume] [--fault KIND] [--steps N]
"""

from __future__ import annotations

import argparse
import copy
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, EXPERTS, ROWS, SAVE_AT = 8, 4, 4, 3

# Fault -> what is true of it. Those of SAVES happen at the save, the others at the load.
FAULTS = {
    "moments-dropped": "the optimizer's state is not in the checkpoint",
    "moments-not-loaded": "the optimizer is read from the checkpoint and not put back",
    "moments-invented": "a frozen parameter gets moments",
    "moments-swapped": "the moments of two parameters are exchanged",
    "count-reset": "the optimizer's step counts begin at 0",
    "scheduler-ahead": "the scheduler makes one step more after the load",
    "scheduler-dropped": "the scheduler is not in the checkpoint",
    "sampler-restarted": "the samples begin anew",
    "generator-reset": "the program seeds again after the load",
    "ema-forgotten": "the averaged weights begin anew from the model",
    "scaler-forgotten": "the loss scale begins anew",
    "experts-permuted": "two experts' rows are exchanged",
    "frozen-lost": "the frozen layer is trained",
    "main-lost": "weights are rounded to bfloat16 at the save",
    "buffer-dropped": "a buffer is not in the checkpoint",
    "read-twice": "each rank reads rank 0's part",
    "counter-lost": "the program's own counter begins anew",
}
_SAVES = ("moments-dropped", "scheduler-dropped", "main-lost", "buffer-dropped")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(EXPERTS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.router(rows).softmax(-1)
        with torch.no_grad():
            self.seen += weight.detach().sum(0)
        mixed = torch.einsum("re,eio,ri->ro", weight, self.up, self.fixed(rows))
        return self.drop(mixed)


class Training:
    """All that the program must save."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(7)
        random.seed(7)
        self.rank, self.world = rank, world
        self.model = Experts()
        self.own = nn.Parameter(torch.full((WIDTH,), 0.1 * (rank + 1)))  # this rank's part
        self.called: Any = nn.parallel.DistributedDataParallel(self.model) if world > 1 else None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW([*trained, self.own], lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.sampler = torch.Generator().manual_seed(11 + rank)
        self.made = 0
        self.smoothing = 0.0

    def step(self) -> None:
        rows = torch.randn(ROWS, WIDTH, generator=self.sampler)
        out = (self.called or self.model)(rows) + self.own
        loss = (out - rows.flip(0)).square().mean() * (1 + self.smoothing)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        with torch.no_grad():
            for mine, theirs in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        self.made += 1
        self.smoothing = 0.01 * self.made

    def content(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(), "own": self.own.data,
            "optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(), "ema": self.ema.state_dict(),
            "sampler": self.sampler.get_state(), "torch": torch.get_rng_state(),
            "python": random.getstate(), "made": self.made,
        }  # fmt: skip

    def save(self, folder: Path, fault: str) -> None:
        found = self.content()
        if fault == "moments-dropped":
            del found["optimizer"]
        elif fault == "scheduler-dropped":
            del found["scheduler"]
        elif fault == "main-lost":
            found["model"] = {k: v.bfloat16() for k, v in found["model"].items()}
        elif fault == "buffer-dropped":
            found["model"] = {k: v for k, v in found["model"].items() if k != "seen"}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(found, folder / f"rank-{self.rank}.pt")

    def load(self, folder: Path, fault: str) -> None:
        rank = 0 if fault == "read-twice" else self.rank
        found = torch.load(folder / f"rank-{rank}.pt", weights_only=False)
        self.model.load_state_dict(found["model"], strict=False)
        self.own.data.copy_(found["own"])
        if "optimizer" in found and fault != "moments-not-loaded":
            self.optimizer.load_state_dict(found["optimizer"])
        if "scheduler" in found:
            self.scheduler.load_state_dict(found["scheduler"])
        if fault != "scaler-forgotten":
            self.scaler.load_state_dict(found["scaler"])
        if fault == "ema-forgotten":
            self.ema.load_state_dict(self.model.state_dict())
        else:
            self.ema.load_state_dict(found["ema"])
        if fault != "sampler-restarted":
            self.sampler.set_state(found["sampler"])
        torch.set_rng_state(found["torch"])
        random.setstate(found["python"])
        self.made = found["made"]
        self.smoothing = 0.0 if fault == "counter-lost" else 0.01 * self.made
        self._break(fault)

    def _break(self, fault: str) -> None:
        """What goes wrong after everything was put back."""
        states = self.optimizer.state
        if fault == "moments-invented":
            fixed = self.model.fixed.weight
            self.optimizer.add_param_group({"params": [fixed]})
            zero = torch.ones_like(fixed)
            states[fixed] = {"step": torch.tensor(3.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}
        elif fault == "moments-swapped":
            one, other = self.own, self.model.up
            up = {k: v.flatten()[:WIDTH].clone() for k, v in states[other].items() if v.dim()}
            states[other].update({k: v.expand_as(other).clone() for k, v in states[one].items()
                                  if v.dim()})  # fmt: skip
            states[one].update(up)
        elif fault == "count-reset":
            for state in states.values():
                state["step"].zero_()
        elif fault == "scheduler-ahead":
            self.scheduler.step()
        elif fault == "generator-reset":
            torch.manual_seed(7)
        elif fault == "experts-permuted":
            self.model.up.data[:2] = self.model.up.data[:2].flip(0).clone()
        elif fault == "frozen-lost":
            self.model.fixed.requires_grad_(True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    training = Training(rank, world)
    if given.resume:
        training.load(given.folder, given.fault)
    while training.made < given.steps:
        training.step()
        if training.made == SAVE_AT:
            training.save(given.folder, given.fault)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
