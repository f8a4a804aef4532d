"""What the programs of experts on a mesh of their own share: the model, the mesh, the steps."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.protocol import Outcome, Trial
from moediag.worker.measure import reference
from moediag.worker.models import tiny
from moediag.worker.models.tiny import Anatomy, NotApplicable
from moediag.worker.shard import dispatch
from moediag.worker.shard.wrapped import Wrapped, clean_fqn
from moediag.worker.tasks import step

Wrap = Callable[[nn.Module, Anatomy, Trial], Wrapped]


def run(trial: Trial, rank: int, recorder: Any, device: torch.device, wrap: Wrap) -> Outcome:
    """All steps of the trial's model as ``wrap`` shards it, against the same in one process. The
    experts are told by ``wrapped.plain_shards``, and which each local row is by ``held``."""
    with recorder.paused() if recorder is not None else contextlib.nullcontext():
        expected = reference.compute(trial, moved=True)
    model = tiny.build(trial.model, trial.step.seed, experts="eager").to(device)
    anatomy = tiny.anatomy(model, trial.model)
    experts = " and ".join(n for n, _ in anatomy.blocks[0].module.experts.named_parameters())
    wrapped = wrap(model, anatomy, trial)
    wrapped.make_optimizer()
    wrapped.notes.insert(0, dispatch.NOTE.format(experts))
    if recorder is not None:
        for note in wrapped.notes:
            recorder.event("note", keep=True, text=note)
    held: Dict[str, List[int]] = getattr(wrapped, "held", {})
    return step.train(wrapped, expected, rank, recorder, device, held)


def mesh(trial: Trial) -> DeviceMesh:
    """The axes dp_shard and ep, in this order, an absent one of size 1. Raises NotApplicable."""
    foreign = [a for a, n in trial.layout.items() if n > 1 and a not in ("dp_shard", "ep")]
    if foreign:
        raise NotApplicable(f"this program has no mesh axis {', '.join(foreign)}")
    sizes = tuple(trial.layout.get(axis, 1) for axis in ("dp_shard", "ep"))
    device = "cuda" if trial.on_gpu else "cpu"
    return init_device_mesh(device, sizes, mesh_dim_names=("dp_shard", "ep"))


def expert_parameters(wrapped: Wrapped) -> Iterator[Tuple[str, Any]]:
    """FQN and parameter, as they are wrapped."""
    for name, parameter in wrapped.model.named_parameters():
        if ".experts." in name:
            yield clean_fqn(name), parameter
