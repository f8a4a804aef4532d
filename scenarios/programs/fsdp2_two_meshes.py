"""FSDP2 over two meshes: the experts over the ranks that hold the same ones, the rest over all.

``experts`` is how they are put on their mesh. ``divide`` is what divides their gradients by the
size of the ep axis, which FSDP2 does not know. ``norm`` is whether clipping knows that axis.
``empty`` is what a rank without tokens does. ``change`` is how routing differs in the recomputation
of activation checkpointing, on the last rank; ``router`` and ``save`` are what is not recomputed.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moediag.axes import DP_SHARD, EP
from moediag.lab.step.collector import Collector
from moediag.lab.step.models.rerouted import NOTES, Rerouted
from moediag.lab.step.shard import activation_checkpointing, dispatch, fsdp2_internals
from moediag.lab.step.shard import clipping as clip
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ProgramTask
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

from . import _meshes

OPTIONS: Dict[str, Any] = {
    "experts": ("own-mesh", "two-axes", "per-parameter"),
    "divide": ("nothing", "world", "world-premul", "ep", "gradients", "loss"),
    "norm": ("mesh", "mesh-and-ep"),
    # What a rank without tokens computes: the released experts on no rows; zeros that depend on
    # the tokens it sends and on its experts; the same of the tokens it received.
    "empty": ("released", "from-input", "from-dispatched"),
    # With step.checkpointing: as in checkpoint-recompute.
    "change": ("none", "metadata"),
    "router": ("inside", "outside"),
    "save": ("nothing", "top-k"),
    "mutate": False,
}


def run(collector: Collector) -> None:
    """Runs the program. Collective. Raises what FSDP2 and clipping raise."""
    change = collector.options["change"]
    collector.note(*filter(None, [NOTES[change]]))
    rerouted = Rerouted(change, collector.trial.model.experts)
    here = collector.rank == collector.trial.world_size - 1
    _meshes.run(collector, TwoMeshes, rerouted.installed(here))


class TwoMeshes(Wrapped):
    """The options of the trial's program. ``held``: each local row's expert, by parameter."""

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(self.trial.task, ProgramTask)
        self.options = self.trial.task.options
        if fsdp2_internals.sums_for_means(self.trial.backend):
            raise NotApplicable("FSDP2 on gloo needs torch >= 2.9")
        device = "cuda" if self.trial.on_gpu else "cpu"
        both = _meshes.mesh(self.trial)
        world = init_device_mesh(device, (self.trial.world_size,), mesh_dim_names=("dp",))
        self.ep = both.size(1)
        rows = dispatch.divide(self.anatomy, both.get_group(str(EP)), self.options["empty"])
        if self.options["router"] == "outside":
            activation_checkpointing.router_outside(self.anatomy)
        else:
            asked = {**self.options, "preserve_rng": True}
            activation_checkpointing.enable(model, self.trial.step.checkpointing, asked)
        ways = {
            "own-mesh": self._own_mesh,
            "two-axes": self._two_axes,
            "per-parameter": self._per_parameter,
        }
        ways[self.options["experts"]](model, both, world)
        if self.options["experts"] != "two-axes" and self.ep > 1:
            self.plain_shards = PlainShards(rows, both.get_group(str(EP)))
        self.held = self._held(model)
        self._divide()
        return model

    # -- ways to use two meshes --------------------------------------------------------

    def _own_mesh(self, model: nn.Module, both: Any, world: Any) -> None:
        """Makes experts separate FSDP groups on the axis dp_shard."""
        from torch.distributed.fsdp import fully_shard

        for experts in self._experts():
            fully_shard(experts, mesh=both[str(DP_SHARD)])
        self._rest(model, world)

    def _two_axes(self, model: nn.Module, both: Any, world: Any) -> None:
        """Does the same with parameters that are already DTensors on the axis ep, so that they
        finally declare both axes."""
        from torch.distributed.tensor import DTensor, Shard

        for experts in self._experts():
            for name, parameter in list(experts.named_parameters()):
                part = DTensor.from_local(parameter.detach(), both[str(EP)], [Shard(0)])
                setattr(experts, name, nn.Parameter(part))
        self._own_mesh(model, both, world)

    def _per_parameter(self, model: nn.Module, both: Any, world: Any) -> None:
        """Calls fully_shard once per layer, with another mesh for the experts in it."""
        from torch.distributed.fsdp import fully_shard

        try:
            from torch.distributed.fsdp._fully_shard._fsdp_common import (
                FSDPMeshInfo,
                ShardPlacementResult,
            )
        except ImportError as error:
            raise NotApplicable(
                f"fully_shard of torch {torch.__version__} has one mesh for all parameters"
            ) from error
        from torch.distributed.tensor import Shard

        theirs = FSDPMeshInfo(mesh=both[str(DP_SHARD)], shard_mesh_dim=0)
        dense = FSDPMeshInfo(mesh=world, shard_mesh_dim=0)
        experts = {id(p) for module in self._experts() for p in module.parameters()}

        def placed(parameter: nn.Parameter) -> Any:
            return ShardPlacementResult(Shard(0), theirs if id(parameter) in experts else dense)

        for _, layer in self.anatomy.layers:
            fully_shard(layer, mesh=world, shard_placement_fn=placed)
        fully_shard(model, mesh=world)

    def _rest(self, model: nn.Module, world: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for _, layer in self.anatomy.layers:
            fully_shard(layer, mesh=world)
        fully_shard(model, mesh=world)

    def _experts(self) -> List[Any]:
        found: List[Any] = [block.module for block in self.anatomy.blocks]
        return [block.experts for block in found]

    # -- divisors ----------------------------------------------------------------------

    def _divide(self) -> None:
        """Sets FSDP2's own factor in the modules whose groups hold experts. In a mixed group it
        applies to both kinds, and the number of all ranks is correct for both."""
        how = self.options["divide"]
        world = self.trial.world_size
        factor = {"world": world, "world-premul": world, "ep": self.ep}
        if how not in factor:
            return
        shared = self.options["experts"] == "per-parameter"
        holders = [layer for _, layer in self.anatomy.layers] if shared else self._experts()
        for module in holders:
            holder: Any = module
            if not hasattr(holder, "set_force_sum_reduction_for_comms"):
                raise NotApplicable(f"FSDP2 of torch {torch.__version__} always divides on the way")
            holder.set_gradient_divide_factor(float(factor[how]))
            # Else torch requests a sum of products, which gloo does not support.
            holder.set_force_sum_reduction_for_comms(how != "world-premul")

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.ep if self.options["divide"] == "loss" else loss)
        if self.options["divide"] == "gradients":
            for _, parameter in _meshes.expert_parameters(self):
                if parameter.grad is not None:
                    pieces.local(parameter.grad).div_(self.ep)

    # -- what each rank holds ----------------------------------------------------------

    def _held(self, model: nn.Module) -> Dict[str, List[int]]:
        held: Dict[str, List[int]] = {}
        for name, parameter in model.named_parameters():
            fqn = clean_fqn(name)
            lines = pieces.lines(parameter)
            if fqn in self.plain_shards.rows and lines:
                held[fqn] = [self.plain_shards.rows[fqn][0] + row for row in lines[0]]
        return held

    def clip(self, limit: float) -> Optional[float]:
        """``norm: mesh`` uses the meshes of the DTensors and ignores the ep axis."""
        parameters = {clean_fqn(name): p for name, p in self.model.named_parameters()}
        known = self.plain_shards if self.options["norm"] == "mesh-and-ep" else PlainShards()
        return clip.clip(parameters, limit, self.trial.step.clipping, known)
