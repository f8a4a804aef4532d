"""Shared code of programs with experts on a separate mesh: model, mesh, steps."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.axes import DP_SHARD, EP, Layout
from moediag.lab.step import training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import reference
from moediag.lab.step.models import tiny
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard import dispatch
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable

Wrap = Callable[[nn.Module, Anatomy, Trial], Wrapped]


def run(collector: Collector, wrap: Wrap, around: Optional[ContextManager[Any]] = None) -> None:
    """Runs all steps of the trial's model, sharded by ``wrap``, and compares them with the same
    steps in one process. ``wrapped.plain_shards`` names the experts' parameters, and ``held`` the
    expert of each local row. ``around``: a context of all steps on the ranks."""
    trial = collector.trial
    with collector.recorder.paused():
        expected = reference.compute(trial, moved=True)
    model = tiny.build(trial.model, trial.step.seed, experts="eager").to(collector.device)
    anatomy = tiny.anatomy(model, trial.model)
    experts = " and ".join(n for n, _ in anatomy.blocks[0].module.experts.named_parameters())
    wrapped = wrap(model, anatomy, trial)
    wrapped.make_optimizer()
    collector.note(dispatch.NOTE.format(experts), *wrapped.notes)
    held: Dict[str, List[int]] = getattr(wrapped, "held", {})
    with around or contextlib.nullcontext():
        training.train(collector, wrapped, expected, held)


def mesh(trial: Trial) -> DeviceMesh:
    """Returns the axes dp_shard and ep; a missing one has size 1. Raises NotApplicable."""
    axes, layout = (DP_SHARD, EP), Layout(trial.layout)
    foreign = [axis for axis in layout.active if axis not in axes]
    if foreign:
        raise NotApplicable(f"this program has no mesh axis {', '.join(foreign)}")
    sizes = tuple(layout.size(axis) for axis in axes)
    device = "cuda" if trial.on_gpu else "cpu"
    return init_device_mesh(device, sizes, mesh_dim_names=tuple(map(str, axes)))


def expert_parameters(wrapped: Wrapped) -> Iterator[Tuple[str, Any]]:
    """Yields FQN and parameter, as wrapped."""
    for name, parameter in wrapped.model.named_parameters():
        if ".experts." in name:
            yield clean_fqn(name), parameter
