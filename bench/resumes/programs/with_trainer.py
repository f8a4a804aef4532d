"""Transformers' ``Trainer``, which finds its checkpoint by itself."""

from __future__ import annotations

from typing import Any

import parts
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Model(parts.Experts):
    def forward(self, rows: torch.Tensor) -> Any:  # type: ignore[override]
        out = super().forward(rows)
        return {"loss": parts.loss_of(out, rows), "out": out}


class Samples(parts.Rows):
    def __getitem__(self, at: int) -> Any:  # type: ignore[override]
        return {"rows": super().__getitem__(at)}


class Breaks(TrainerCallback):
    """What goes wrong after everything was loaded."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **found: Any) -> None:
        if not state.global_step:
            return
        if self.fault == "scheduler-ahead":
            found["lr_scheduler"].step()
        elif self.fault == "count-reset":
            for own in found["optimizer"].state.values():
                own["step"].zero_()
        elif self.fault == "experts-permuted":
            parts.permute(found["model"].up)


def main(folder: Any, resume: bool, fault: str) -> None:
    set_seed(3)
    options = TrainingArguments(
        str(folder), per_device_train_batch_size=parts.ROWS, max_steps=parts.STEPS,
        save_steps=parts.SAVE_AT, report_to=[], use_cpu=True, learning_rate=0.05,
        save_only_model=fault == "moments-dropped",
        ignore_data_skip=fault == "sampler-restarted",
    )  # fmt: skip
    trainer = Trainer(Model(), options, train_dataset=Samples(), callbacks=[Breaks(fault)])
    trainer.train(resume_from_checkpoint=True if resume else None)


if __name__ == "__main__":
    typed = parts.given()
    main(typed.folder, typed.resume, typed.fault)
