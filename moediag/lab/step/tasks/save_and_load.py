"""Ways to save a model with its optimizer and to load both, each as its documentation says.

Nothing here repairs or checks what a library does, because a resume trial tests that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, Type

import torch
import torch.distributed as dist

from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ResumeTask, Trial
from moediag.recorder.not_applicable import NotApplicable


class Way:
    """All methods but ``check`` and ``source`` are collective: every rank calls them."""

    def __init__(self, task: ResumeTask) -> None:
        self.task = task

    def check(self, wrapped: Wrapped) -> None:
        """Raises NotApplicable if ``wrapped`` cannot be saved in this way."""

    def source(self, trial: Trial, folder: Path) -> Trial:
        """Returns the trial that the new model is made from, before anything is loaded into it."""
        return trial

    def save(self, wrapped: Wrapped, folder: Path) -> None:
        raise NotImplementedError

    def load(self, wrapped: Wrapped, folder: Path) -> None:
        """Loads into ``wrapped``, newly made from :meth:`source`."""
        raise NotImplementedError


class Dcp(Way):
    """Saves model and optimizer by torch.distributed.checkpoint, from get_state_dict."""

    def save(self, wrapped: Wrapped, folder: Path) -> None:
        from torch.distributed.checkpoint import save

        save(self._state(wrapped), checkpoint_id=str(folder))

    def load(self, wrapped: Wrapped, folder: Path) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state(wrapped)
        load(state, checkpoint_id=str(folder))
        set_state_dict(
            wrapped.model,
            wrapped.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self, wrapped: Wrapped) -> Dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(wrapped.model, wrapped.optimizer)
        return {"model": model, "optimizer": optimizer}


class DcpModel(Way):
    """Saves the model alone; the optimizer begins anew."""

    def save(self, wrapped: Wrapped, folder: Path) -> None:
        from torch.distributed.checkpoint import save
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        save(get_model_state_dict(wrapped.model), checkpoint_id=str(folder))

    def load(self, wrapped: Wrapped, folder: Path) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            set_model_state_dict,
        )

        state = get_model_state_dict(wrapped.model)
        load(state, checkpoint_id=str(folder))
        set_model_state_dict(wrapped.model, state)


class Accelerate(Way):
    """Uses ``Accelerator.save_state`` and ``load_state``."""

    def check(self, wrapped: Wrapped) -> None:
        if getattr(wrapped, "accelerator", None) is None:
            kind = wrapped.trial.wrapper.kind
            raise NotApplicable(f"save_state is accelerate's, and this model is of kind {kind}")

    def save(self, wrapped: Wrapped, folder: Path) -> None:
        accelerated: Any = wrapped  # ensured by check
        accelerated.accelerator.save_state(str(folder))

    def load(self, wrapped: Wrapped, folder: Path) -> None:
        accelerated: Any = wrapped
        accelerated.accelerator.load_state(str(folder))


class SavePretrained(Way):
    """Saves the model by save_pretrained on every rank and loads it by from_pretrained. Saves the
    optimizer's own state_dict by torch.save, one file per rank, without using the library."""

    def source(self, trial: Trial, folder: Path) -> Trial:
        model = dataclasses.replace(trial.model, source="checkpoint")
        # Trial.checkpoint_path is beside the reference.
        return dataclasses.replace(trial, model=model, reference_path=str(folder / "model"))

    def save(self, wrapped: Wrapped, folder: Path) -> None:
        model: Any = wrapped.model
        model = getattr(model, "module", model)  # DDP's wrapper
        path = self.source(wrapped.trial, folder).checkpoint_path
        model.save_pretrained(str(path), is_main_process=dist.get_rank() == 0)
        torch.save(wrapped.own_optimizer.state_dict(), self._file(folder))

    def load(self, wrapped: Wrapped, folder: Path) -> None:
        # This run wrote the pickle itself.
        state = torch.load(self._file(folder), map_location=wrapped.device, weights_only=False)
        wrapped.own_optimizer.load_state_dict(state)

    def _file(self, folder: Path) -> Path:
        return folder / f"optimizer-{dist.get_rank()}.pt"


WAYS: Dict[str, Type[Way]] = {
    "dcp": Dcp,
    "dcp-model": DcpModel,
    "accelerate": Accelerate,
    "save-pretrained": SavePretrained,
}


def way_of(task: ResumeTask) -> Way:
    """Returns the way. Raises NotApplicable for a name that is not in WAYS."""
    if task.through not in WAYS:
        raise NotApplicable(f"no way to save called {task.through!r}")
    return WAYS[task.through](task)
