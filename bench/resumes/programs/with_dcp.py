"""FSDP2 with ``torch.distributed.checkpoint`` and a ``Stateful`` object, as torch's recipe has it.
The number of ranks may differ between the save and the load."""

from __future__ import annotations

from typing import Any

import parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

ALL = 8  # samples of all ranks in a step


class Training(Stateful):
    def __init__(self, model: Any, optimizer: Any, scheduler: Any, fault: str) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.fault = fault

    def state_dict(self) -> dict[str, Any]:
        if self.fault == "moments-dropped":
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        else:
            model, optimizer = get_state_dict(self.model, self.optimizer)
        found = {"model": model, "optimizer": optimizer, "torch": torch.get_rng_state()}
        if self.fault != "scheduler-dropped":
            found["scheduler"] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, found: dict[str, Any]) -> None:
        if self.fault == "moments-dropped":
            self.model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])
        else:
            set_state_dict(
                self.model, self.optimizer,
                model_state_dict=found["model"], optim_state_dict=found["optimizer"],
            )  # fmt: skip
        if "scheduler" in found:
            self.scheduler.load_state_dict(found["scheduler"])
        torch.set_rng_state(found["torch"])
        if self.fault == "experts-permuted":
            with torch.no_grad():
                up = self.model.up
                whole = up.full_tensor()
                parts.permute(whole)
                up.copy_(distribute_tensor(whole, up.device_mesh, up.placements))
        elif self.fault == "scheduler-ahead":
            self.scheduler.step()
        elif self.fault == "count-reset":
            for state in self.optimizer.state.values():
                state["step"].zero_()


def main(folder: Any, resume: bool, fault: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = parts.Experts()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    training = Training(model, optimizer, scheduler, fault)
    made = 0
    if resume:
        dcp.load({"app": training}, checkpoint_id=folder / "step-3")
        made = parts.SAVE_AT
    data = parts.Rows()
    own = ALL // world
    for step in range(made, parts.STEPS):
        first = 0 if resume and fault == "sampler-restarted" else step
        at = first * ALL + rank * own
        rows = torch.stack([data[n] for n in range(at, at + own)])
        optimizer.zero_grad()
        parts.loss_of(model(rows), rows).backward()
        optimizer.step()
        scheduler.step()
        if step + 1 == parts.SAVE_AT and not resume:
            dcp.save({"app": training}, checkpoint_id=folder / "step-3")
    dist.destroy_process_group()


if __name__ == "__main__":
    typed = parts.given()
    main(typed.folder, typed.resume, typed.fault)
