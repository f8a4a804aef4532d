"""A model ready to train, and the place of this rank's part of each parameter in the whole one.

``gradients()`` yields, per parameter, this rank's part of the gradient and a function that cuts the
same part out of the full one. The ways to shard are in :mod:`moediag.lab.step.shard.data_parallel`
and :mod:`moediag.lab.step.shard.expert_parallel`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.axes import AXES, DP_REPLICATE, DP_SHARD, EP, Axis, Layout
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard import clipping as clip
from moediag.lab.step.shard import optimizers
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

ROUTER_LOGITS = "output_router_logits"  # a switch of configurations
Select = Callable[[torch.Tensor], torch.Tensor]
GradientView = Tuple[str, Optional[torch.Tensor], Select]


def expert_parameters(model: nn.Module, anatomy: Anatomy) -> Dict[str, Any]:
    """Returns FQN -> parameter with the experts as its first dimension, of every MoE block."""
    inside = tuple(f"{block.fqn}.experts." for block in anatomy.blocks)
    found = {}
    for name, parameter in model.named_parameters():
        fqn = clean_fqn(name)
        # A ModuleList has 2-D weights and "experts.3." in their names: whole or absent, never cut.
        if fqn.startswith(inside) and "." not in fqn.rpartition(".experts.")[2]:
            found[fqn] = parameter
    return found


def mesh_of(trial: Trial, *beside: Axis) -> DeviceMesh:
    """Returns the device mesh of the trial's data-parallel axes and those ``beside`` them. Raises
    NotApplicable for any other axis."""
    layout = Layout(trial.layout)
    foreign = [a for a in layout.active if not a.data_parallel and a not in beside]
    if foreign:
        raise NotApplicable(f"wrapper {trial.wrapper.kind} has no mesh axis {', '.join(foreign)}")
    # Replicas are a mesh dim beside the shards', whatever their sizes. Any other axis of size 1
    # would only add empty collectives.
    replicated = (DP_REPLICATE, DP_SHARD) if DP_REPLICATE in layout.axes else ()
    used = [axis for axis in AXES if axis in (*layout.active, *replicated)]
    sizes = {axis: layout.size(axis) for axis in used} or {DP_SHARD: trial.world_size}
    device = "cuda" if trial.on_gpu else "cpu"
    names = tuple(str(axis) for axis in sizes)
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=names)


class Wrapped:
    """A model ready to train. The base class is the unsharded model of a single process.

    ``tells_slices``: parameters are DTensors, plain whole tensors, or ``plain_shards``, so that
    every rank can say which slice of the whole it holds. Flat parameters cannot.
    """

    tells_slices = True
    plain_shards = PlainShards()

    def __init__(self, model: nn.Module, anatomy: Anatomy, trial: Trial) -> None:
        self.anatomy = anatomy
        self.trial = trial
        self.ep_rank = ep_rank(trial)
        self._places: Dict[str, Select] = {}
        self.device = next(model.parameters()).device
        self.notes: List[str] = []
        self.model = self.wrap(model)
        self.optimizer: Any = None

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizer(self) -> None:
        """Call it after fixes have been applied: they may still add hooks, not parameters."""
        self.optimizer = optimizers.build(self.model.parameters(), self.trial.step)

    @property
    def own_optimizer(self) -> Any:
        """Returns torch's own optimizer, without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns mean next-token cross-entropy, fp32 scalar. tokens (batch, seq_len) int64."""
        # The mask is all ones. Without one, some releases mistake 3-D position ids of multimodal
        # families for packed sequences.
        mask = torch.ones_like(tokens)
        if self.trial.model.config.get(ROUTER_LOGITS):
            return self._own_loss(tokens, mask)
        logits: Any = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        if pieces.distributed(logits):
            logits = logits.full_tensor()
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1)
        )

    def _own_loss(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the model's own loss with its auxiliary part."""
        found = self.model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False)
        if getattr(found, "aux_loss", None) is None:
            raise NotApplicable(f"{self.trial.model.family} returns no auxiliary loss")
        loss: torch.Tensor = found.loss
        return loss

    def forward_backward(self, batches: List[torch.Tensor]) -> float:
        """Runs one step's micro-batches of token ids; returns this rank's mean loss."""
        total = 0.0
        for number, tokens in enumerate(batches):
            with self.accumulating(last=number == len(batches) - 1):
                loss = self.loss(tokens) / len(batches)
                self.backward(loss)
            total += float(loss.detach())
        return total

    def accumulating(self, last: bool) -> ContextManager[Any]:
        """Disables gradient reduction during forward and backward of one micro-batch."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, limit: float) -> Optional[float]:
        """Clips to ``limit``; returns the norm before, or None if unknown."""
        parameters = {clean_fqn(name): p for name, p in self.model.named_parameters()}
        return clip.clip(parameters, limit, self.trial.step.clipping, self.plain_shards)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gathered(self) -> ContextManager[Any]:
        """Restores flattened or emptied parameters while they are read. Collective."""
        return contextlib.nullcontext()

    def gradients(self) -> Iterator[GradientView]:
        for name, parameter in self.model.named_parameters():
            fqn = clean_fqn(name)
            if fqn not in self._places:
                self._places[fqn] = self._place(parameter)
            yield fqn, reduced(parameter), self._places[fqn]

    def weights(self) -> Iterator[GradientView]:
        """Yields this rank's part of each parameter, like ``gradients()``."""
        for name, parameter in self.model.named_parameters():
            fqn = clean_fqn(name)
            if fqn not in self._places:
                self._places[fqn] = self._place(parameter)
            yield fqn, pieces.local(parameter), self._places[fqn]

    def _place(self, parameter: Any) -> Select:
        """Returns a function that cuts this rank's part out of the full tensor, by the placement. A
        smaller plain tensor is the piece at this rank's place on the ep axis."""
        shape = tuple(pieces.local(parameter).shape)
        where = pieces.where(parameter)
        if where.kind != pieces.WHOLE:
            return lambda full: where.cut(full, shape)
        at = self.ep_rank
        return lambda full: pieces.plain_piece(full, shape, at)


def synchronize() -> None:
    """Waits at a barrier and for the device's queue, so that time measurements are meaningful."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()


def whole(full: torch.Tensor) -> torch.Tensor:
    return full


def reduced(parameter: Any) -> Optional[torch.Tensor]:
    """Returns this rank's part of the gradient. If its layout differs from its parameter's (a
    pending sum, say), it is redistributed first: collective, on all ranks alike."""
    gradient = parameter.grad
    if gradient is None or not pieces.distributed(gradient):
        return gradient
    if not pieces.distributed(parameter):
        gradient = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return pieces.local(gradient)


def ep_rank(trial: Trial) -> Optional[int]:
    """Returns this rank's place on the ep axis; None without one."""
    layout = Layout(trial.layout)
    if EP not in layout.active or not dist.is_initialized():
        return None
    return layout.index(EP, dist.get_rank())
