"""Data that must be equal on several ranks, written by each rank without communication.

Ranks that declare the same slice of the same parameter hold replicas of it. Whole tensors are too
large to write, so each rank writes a *sketch*: 16 random +-1 projections (the same on every rank)
and the norm. A sketch is linear, so the distance of two sketches estimates the L2 distance of the
two tensors (Johnson and Lindenstrauss; with 16 projections within about a third), and is zero if
they are equal. The control side compares.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Protocol

import torch
import torch.distributed as dist
from torch import nn

from moediag.axes import EP, Layout
from moediag.lab.step.shard import declared_slices, optimizers
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.lab.step.shard.wrapped import Wrapped, expert_parameters
from moediag.protocol import Replica, Sketch, StepReplicas, Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import numbers, pieces


def sketch(tensor: torch.Tensor) -> Sketch:
    """Returns the sketch of ``tensor`` (any shape and floating dtype)."""
    return Sketch(*numbers.projected(tensor))


class Observed(Protocol):
    """The part of :class:`moediag.lab.step.shard.wrapped.Wrapped` that is read here; ``trial`` for
    its ``computes_in``."""

    model: nn.Module
    optimizer: Any
    trial: Trial
    plain_shards: PlainShards
    tells_slices: bool


class Observer:
    """Collects :class:`StepReplicas` by step; step "0" holds the weights before training."""

    def __init__(self, wrapped: Observed, world_size: int) -> None:
        self._wrapped = wrapped
        self._world_size = world_size
        self._steps: Dict[str, StepReplicas] = {}
        self._gradients: Dict[str, Sketch] = {}
        self._has_gradient: Dict[str, bool] = {}
        self._slices: Dict[str, str] = {}
        self._local_norm: Optional[float] = None
        self.after_optimizer(0)

    @property
    def steps(self) -> Dict[str, StepReplicas]:
        return self._steps

    def before_clip(self) -> None:
        """Call it when gradients are reduced and not yet clipped."""
        if not self._wrapped.tells_slices:
            return
        total = 0.0
        self._gradients = {}
        for fqn, parameter in self._parameters():
            gradient = parameter.grad
            self._has_gradient[fqn] = gradient is not None
            if gradient is None:
                continue
            norm = torch.linalg.vector_norm(pieces.local(gradient).double())
            total += float(norm) ** 2
            if self._shared(parameter) and pieces.placed_alike(parameter, gradient):
                self._gradients[fqn] = sketch(pieces.local(gradient))
        self._local_norm = numbers.for_json(math.sqrt(total))

    def after_optimizer(self, step: int) -> None:
        """Call it after the optimizer's step; ``step`` from 1, 0 for the initial weights."""
        parameters: Dict[str, Replica] = {}
        optimizer = self._wrapped.optimizer
        if self._wrapped.tells_slices:
            for fqn, parameter in self._parameters():
                if not self._shared(parameter):
                    continue
                if fqn not in self._slices:
                    plain = self._wrapped.plain_shards
                    self._slices[fqn] = declared_slices.describe(fqn, parameter, plain)
                parameters[fqn] = Replica(
                    slice=self._slices[fqn],
                    kind=declared_slices.mesh_name(parameter),
                    weight=sketch(pieces.local(parameter)),
                    gradient=self._gradients.get(fqn),
                    has_gradient=self._has_gradient.get(fqn),
                    state=state_sketches(optimizer, parameter),
                )
        counts = step_counts(optimizer) if step else []
        self._steps[str(step)] = StepReplicas(
            parameters=parameters,
            dtype=self._wrapped.trial.computes_in,
            local_norm=self._local_norm,
            optimizer_steps=[min(counts), max(counts)] if counts else [],
            learning_rates=learning_rates(optimizer),
        )

    def _parameters(self) -> Any:
        for name, parameter in self._wrapped.model.named_parameters():
            yield clean_fqn(name), parameter

    def _shared(self, parameter: Any) -> bool:
        """Whether another rank can hold the same slice. Excludes fully sharded parameters, most of
        an FSDP model; includes plain tensors, since other ranks may hold their rows too."""
        return declared_slices.holders(parameter, self._world_size) > 1


def plain_experts(wrapped: Wrapped) -> PlainShards:
    """Returns expert parameters that are plain tensors with fewer rows than experts. Each rank
    declares the rows of its place on the ep axis. May create process groups: collective."""
    trial = wrapped.trial
    rows = {}
    for fqn, parameter in expert_parameters(wrapped.model, wrapped.anatomy).items():
        count = int(parameter.shape[0])
        at = wrapped.ep_rank
        if not pieces.distributed(parameter) and at is not None and count < trial.model.experts:
            size = Layout(trial.layout).size(EP)
            mine = EP.mine(count * size, at, size, experts=True)
            rows[fqn] = (mine.start, mine.stop)
    if not rows:
        return PlainShards()
    layout = Layout(trial.layout)
    if layout.size(EP) == trial.world_size:
        return PlainShards(rows, dist.group.WORLD)
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in layout.groups(EP)])
    return PlainShards(rows, group)


def state_sketches(optimizer: Any, parameter: Any) -> Dict[str, Sketch]:
    """Returns sketches of the optimizer's tensors with the layout of ``parameter`` (its moments,
    not its step count), by name."""
    optimizer = optimizers.unwrapped(optimizer)
    state: Any = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {
        name: sketch(pieces.local(value))
        for name, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and pieces.placed_alike(parameter, value)
        and value.is_floating_point()
    }


def step_counts(optimizer: Any) -> List[float]:
    """Returns ``state["step"]`` of every parameter that has one."""
    optimizer = optimizers.unwrapped(optimizer)
    if optimizer is None:
        return []
    return [float(s["step"]) for s in list(optimizer.state.values()) if "step" in s]


def learning_rates(optimizer: Any) -> List[float]:
    """Returns one per parameter group."""
    optimizer = optimizers.unwrapped(optimizer)
    if optimizer is None:
        return []
    return [float(group["lr"]) for group in optimizer.param_groups]
