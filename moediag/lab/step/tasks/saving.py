"""What ranks save under a layout, loaded into one process: every parameter and buffer must hold the
checkpoint's bytes."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import torch
import torch.distributed as dist

from moediag.lab.step import preparation
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import reference, row_map
from moediag.lab.step.models import checkpoint, release_families, tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # variables


def run(collector: Collector) -> None:
    """Loads, saves before any step, and loads what was saved on rank 0. Collective. Raises what the
    library raises."""
    trial = collector.trial
    wrapped = preparation.prepare(trial, collector.device)
    collector.note(*wrapped.notes)
    folder = Path(str(trial.reference_path)).with_name(f"saved-{trial.name}")
    collector.recorder.phase("saving")
    _save(wrapped, folder)
    dist.barrier()
    if collector.rank == 0:
        with collector.recorder.paused():
            collector.set(**_compared(trial, folder))
        shutil.rmtree(folder, ignore_errors=True)
    collector.set(steps_done=1)
    dist.barrier()


def _save(wrapped: Wrapped, folder: Path) -> None:
    """Saves as the documentation of the library says that shards."""
    model: Any = wrapped.model
    model = getattr(model, "module", model)  # DDP's wrapper
    accelerator: Any = getattr(wrapped, "accelerator", None)
    if accelerator is None:
        model.save_pretrained(str(folder), is_main_process=dist.get_rank() == 0)
        return
    accelerator.unwrap_model(model).save_pretrained(
        str(folder),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )


def _compared(trial: Trial, folder: Path) -> Dict[str, Any]:
    """Returns the fields of the Outcome."""
    truth = reference.load(str(trial.reference_path))["weights"]
    different: Dict[str, str] = {}
    compared = 0
    for name, tensor in _tensors(trial, folder):
        if name not in truth:
            continue
        compared += 1
        if tensor.is_meta:
            different[name] = "is on the meta device"
        elif not torch.equal(tensor, truth[name].to(tensor.dtype)):
            different[name] = row_map.describe(tensor, None, truth[name])
    return {"saved": different, "saved_compared": compared}


def _tensors(trial: Trial, folder: Path) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yields what one process loads, which no launcher started."""
    config_class, model_class = tiny.import_family(trial.model)
    dtype = {checkpoint.dtype_argument(): getattr(torch, trial.model.dtype)}
    launched = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    try:
        loaded = release_families.from_pretrained(model_class, config_class, str(folder), **dtype)
    finally:
        os.environ.update(launched)
    for name, tensor in itertools.chain(loaded.named_parameters(), loaded.named_buffers()):
        yield name, tensor.detach()
