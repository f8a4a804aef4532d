"""Accelerate's ``save_state`` and ``load_state``, as its guide to checkpoints has them."""

from __future__ import annotations

from typing import Any

import parts
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn


def main(folder: Any, resume: bool, fault: str) -> None:
    # Without it each iterator of the loader draws another order.
    seedable = DataLoaderConfiguration(use_seedable_sampler=fault != "order-drawn")
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
    set_seed(3)
    plain = parts.Experts()
    if fault == "read-twice":
        # Each rank has experts of its own, as plain tensors of one name.
        plain.up.data += accelerator.process_index
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            plain, ["up"]
        )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = torch.utils.data.DataLoader(parts.Rows(), batch_size=parts.ROWS, shuffle=True)
    average = parts.Average(plain)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    if fault != "scheduler-dropped":
        scheduler = accelerator.prepare(scheduler)
    if fault != "ema-forgotten":
        accelerator.register_for_checkpointing(average)
    if fault == "main-lost":
        accelerator.register_save_state_pre_hook(round_weights)
    made, batches = 0, loader
    if resume:
        if fault == "moments-dropped":
            path = folder / "step-3" / "model.safetensors"
            from safetensors.torch import load_file

            accelerator.unwrap_model(model).load_state_dict(load_file(path))
        else:
            accelerator.load_state(folder / "step-3")
        made = parts.SAVE_AT
        if fault != "sampler-restarted":
            batches = accelerator.skip_first_batches(loader, made)
        if fault == "generator-reset":
            set_seed(3)
        elif fault == "scheduler-ahead":
            scheduler.step()
        elif fault == "count-reset":
            for state in optimizer.state.values():
                state["step"].zero_()
        elif fault == "experts-permuted":
            parts.permute(plain.up)
    restored = torch.get_rng_state() if resume else None
    for rows in batches:
        if restored is not None and fault not in ("seed-drawn", "generator-reset"):
            torch.set_rng_state(restored)  # the loader's iterator has drawn its seed by now
        restored = None
        loss = parts.loss_of(model(rows), rows)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        average.update(plain)
        made += 1
        if made == parts.SAVE_AT:
            accelerator.save_state(folder / "step-3")
        if made == parts.STEPS:
            break
    accelerator.end_training()


def round_weights(_models: Any, weights: Any, _folder: str) -> None:
    for state in weights:
        state.update({name: value.bfloat16() for name, value in state.items()})


if __name__ == "__main__":
    typed = parts.given()
    main(typed.folder, typed.resume, typed.fault)
