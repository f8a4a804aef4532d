"""Lightning's ``Trainer.fit(ckpt_path=…)`` with ``ModelCheckpoint``."""

from __future__ import annotations

import os
from typing import Any

import lightning
import parts
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Training(lightning.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.model = parts.Experts()
        self.average = parts.Average(self.model)

    def training_step(self, rows: torch.Tensor, _at: int) -> torch.Tensor:
        return parts.loss_of(self.model(rows), rows)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.fault != "ema-behind":
            self.average.update(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.fault == "ema-behind":  # ModelCheckpoint has saved by now
            self.average.update(self.model)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["torch"] = torch.get_rng_state()
        if self.fault != "ema-forgotten":
            checkpoint["average"] = self.average.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.generator = checkpoint["torch"]
        if "average" in checkpoint:
            self.average.load_state_dict(checkpoint["average"])
        if self.fault == "scheduler-dropped":
            checkpoint["lr_schedulers"] = []
        elif self.fault == "moments-dropped":
            checkpoint["optimizer_states"] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """The first batch was drawn by now, which itself takes from the generator."""
        generator = self.__dict__.pop("generator", None)
        if generator is None:
            return
        if self.fault != "generator-reset":
            torch.set_rng_state(generator)
        if self.fault == "experts-permuted":
            parts.permute(self.model.up)
        elif self.fault == "scheduler-ahead":
            self.lr_schedulers().step()


def main(folder: Any, resume: bool, fault: str) -> None:
    lightning.seed_everything(3, verbose=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kind, sampler = torch.utils.data.DataLoader, None
    if fault != "sampler-restarted":
        # Lightning asks a loader for its state if it has one.
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    if world > 1 and fault != "order-drawn":
        rank = int(os.environ["RANK"])
        sampler = torch.utils.data.DistributedSampler(parts.Rows(), world, rank)
    loader = kind(parts.Rows(), parts.ROWS, shuffle=sampler is None, sampler=sampler)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto",
        max_steps=parts.STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        use_distributed_sampler=sampler is None,
        callbacks=[
            ModelCheckpoint(folder, "{step}", every_n_train_steps=parts.SAVE_AT, save_top_k=-1)
        ],
    )  # fmt: skip
    trainer.fit(Training(fault), loader, ckpt_path=folder / "step=3.ckpt" if resume else None)


if __name__ == "__main__":
    typed = parts.given()
    main(typed.folder, typed.resume, typed.fault)
