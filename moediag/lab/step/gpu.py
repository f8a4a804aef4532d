"""The GPU that a rank computes on, and the settings of the communication libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, List

import torch

from moediag.protocol import WATCHDOG_DUMPS, WATCHDOG_PIPES, Trial

# torch's Flight Recorder writes to this prefix plus the rank; newer and older name.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# torch creates a pipe at this prefix; a write to it requests a dump, even if no Python runs.
_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def device(trial: Trial) -> torch.device:
    """Returns this rank's device: the CPU, its own GPU, or a shared one, assigned in turn."""
    if not trial.on_gpu:
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    return torch.device("cuda", local % torch.cuda.device_count() if trial.shared_gpu else local)


def _existing(set_device: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns ``set_device`` for numbers of local ranks, taken modulo the number of GPUs."""

    def shared(number: Any) -> None:
        set_device(number % torch.cuda.device_count() if isinstance(number, int) else number)

    return shared


def settle(trial: Trial, folder: Path) -> List[str]:
    """Sets the variables that the trial requests, unless the user set them; returns notes on what
    applies. Call it before the process group is created, which reads these variables."""
    notes = []
    for name, value in trial.environment.items():
        os.environ.setdefault(name, value)
    if trial.shared_gpu:
        # accelerate and transformers would use the GPU with the local rank's number.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", str(device(trial)))
        torch.cuda.set_device = _existing(torch.cuda.set_device)
        ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        where = "gloo on CUDA tensors" if trial.backend == "gloo" else trial.backend
        few = f"{gpus} GPU{'' if gpus == 1 else 's'}"
        notes.append(f"{ranks} ranks share {few} (--share-gpu), {where}")
    if trial.environment:
        for name in _DUMPS:
            os.environ.setdefault(name, str(folder / WATCHDOG_DUMPS))
        os.environ.setdefault(_PIPES, str(folder / WATCHDOG_PIPES))
        held = ", ".join(f"{name}={os.environ[name]}" for name in trial.environment)
        notes.append(f"set for the process group: {held}")
    return notes
