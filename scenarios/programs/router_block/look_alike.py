"""A MoE block under tensor parallelism in plain torch, laid out as torchtitan's own.

Not torchtitan's code. The same: sequence-sharded input and output, a gate that every rank computes
whole on a replicated DTensor, routed experts on plain local tensors, shared experts by torch's
ColwiseParallel and RowwiseParallel, and with expert TP = 1 a slice of the folded tokens on each
rank. Different: with expert TP = 1 the experts' weights are gathered where torchtitan sends the
tokens, and nothing is padded. The gradients are the same.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moediag.axes import TP
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

from .plans import Cell, Plan

NOTES = [
    "a look-alike of torchtitan's MoE block in plain torch, not torchtitan's code; "
    "tp-router-torchtitan runs that"
]


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)


class Experts(nn.Module):
    """w1 and w3 (experts, intermediate, hidden), w2 (experts, hidden, intermediate)."""

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.w3 = nn.Parameter(torch.empty(experts, intermediate, hidden))


class SharedExperts(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, hidden, bias=False)
        self.w3 = nn.Linear(hidden, intermediate, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Maps x (batch, sequence, hidden) to the same shape. Once parallelized, ``sharding`` is set
    and x is this rank's part of the sequence."""

    def __init__(self, trial: Trial, cell: Cell) -> None:
        super().__init__()
        model = trial.model
        self.top_k, self.cell = model.top_k, cell
        self.router = Router(model.hidden, model.experts)
        self.experts = Experts(model.hidden, model.intermediate, model.experts)
        self.shared_experts = SharedExperts(model.hidden, model.intermediate)
        self.sharding: Optional[Sharding] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sharding is not None:
            x = self.sharding.enter(x)
        tokens = x.reshape(-1, x.shape[-1])
        scores = F.softmax(self._gate(tokens), dim=-1)
        top, chosen = torch.topk(scores, self.top_k, dim=-1)
        first, last = self._slice(len(tokens))
        top, chosen = top[first:last].reshape(-1, 1), chosen[first:last].reshape(-1)
        at = torch.arange(first, last, device=x.device).repeat_interleave(self.top_k)
        routed = tokens[at]
        if self.cell.scores_before:
            routed = routed * top
        out = self._experts(routed, chosen)
        if not self.cell.scores_before:
            out = out * top
        out = torch.zeros_like(tokens).index_add(0, at, out) + self.shared_experts(tokens)
        out = out.reshape(x.shape)
        return out if self.sharding is None else self.sharding.leave(out)

    def _gate(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.sharding is None:
            logits: torch.Tensor = self.router.gate(tokens)
            return logits
        return self.sharding.gate(self.router.gate, tokens)

    def _slice(self, tokens: int) -> Tuple[int, int]:
        """Returns this rank's part of the folded tokens: all, or a slice if experts are not cut."""
        if self.sharding is None or self.cell.tensor_parallel:
            return 0, tokens
        part = tokens // self.sharding.mesh.size()
        return self.sharding.mesh.get_local_rank() * part, part * (
            self.sharding.mesh.get_local_rank() + 1
        )

    def _experts(self, routed: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights: List[torch.Tensor] = [self.experts.w1, self.experts.w2, self.experts.w3]
        if self.sharding is not None:
            routed = self.sharding.routed(routed, self.cell)
            weights = [self.sharding.weight(w, self.cell) for w in weights]
        w1, w2, w3 = weights
        out = torch.zeros_like(routed)
        for expert in range(len(w1)):
            rows = (chosen == expert).nonzero().reshape(-1)
            x = routed[rows]
            hidden = F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())
            out = out.index_add(0, rows, hidden @ w2[expert].t())
        return out


class Sharding:
    """Converts between DTensors and plain tensors at the bounds of a sharded block. Its plan
    decides how gradients are treated there."""

    def __init__(self, mesh: Any, plan: Plan) -> None:
        self.mesh = mesh
        self.plan = plan

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the whole sequence from a part of it."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
        return _local(whole.redistribute(placements=[Replicate()]), self.plan.boundary)

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sum, from parts of a sum over the whole sequence."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        parts = DTensor.from_local(out, self.mesh, [Partial()], run_check=False)
        local: torch.Tensor = parts.redistribute(placements=[Shard(1)]).to_local()
        return local

    def gate(self, gate: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
        logits = gate(replicated(tokens, self.mesh, self.plan.gate_input))
        return _local(logits, self.plan.gate_output)

    def routed(self, x: torch.Tensor, cell: Cell) -> torch.Tensor:
        if not cell.tensor_parallel or not self.plan.routed_input:
            return x
        return _local(replicated(x, self.mesh, summed=True), partial=True)

    def weight(self, weight: Any, cell: Cell) -> torch.Tensor:
        local = _local(weight, self.plan.weights)
        if cell.tensor_parallel:
            return local
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        gathered: torch.Tensor = all_gather_tensor_autograd(local, 0, self.mesh.get_group())
        return gathered


def replicated(x: torch.Tensor, mesh: Any, summed: bool) -> Any:
    """Returns ``x``, the same on all ranks, as a DTensor. ``summed``: parts of its gradient are
    summed over the ranks (torch's default), else they stay parts."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if summed:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    try:
        return DTensor.from_local(
            x, mesh, [Replicate()], run_check=False, grad_placements=(Partial(),)
        )
    except TypeError as error:
        raise NotApplicable(
            f"torch {torch.__version__} has no grad_placements for DTensor.from_local"
        ) from error


def _local(x: Any, partial: bool) -> torch.Tensor:
    from torch.distributed.tensor import Partial

    local: torch.Tensor = x.to_local(grad_placements=(Partial(),) if partial else None)
    return local


def build(trial: Trial, cell: Cell) -> nn.Module:
    return Block(trial, cell)


def parallelize(model: Any, cell: Cell, plan: Plan, device: torch.device) -> None:
    """Shards the block of the only layer of ``model`` over all ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    block = model.layers["0"].moe
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(str(TP),))
    distribute_module(block.router.gate, mesh)
    for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
        weight = getattr(block.experts, name).detach()
        placed = distribute_tensor(weight, mesh, [Shard(dim if cell.tensor_parallel else 0)])
        block.experts.register_parameter(name, nn.Parameter(placed))
    column = colwise(plan)
    styles = {"w1": column, "w2": RowwiseParallel(output_layouts=Partial()), "w3": column}
    parallelize_module(block.shared_experts, mesh, styles)
    block.sharding = Sharding(mesh, plan)


def colwise(plan: Plan) -> Any:
    """Returns torch's ColwiseParallel; its input's gradient stays parts of a sum if the plan says
    so."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    if plan.shared_input:
        return ColwiseParallel()

    class PartsDown(ColwiseParallel):
        @staticmethod
        def _prepare_input_fn(
            input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
        ) -> Any:
            return replicated(inputs[0], device_mesh, summed=False)

    return PartsDown()
