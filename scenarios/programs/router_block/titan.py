"""torchtitan's own MoE, sharded by torchtitan's own plan (0.2.x), with a fix at single places.

Everything not named in the fix's plan is the installed release's code: the module, the router, the
expert-parallel styles and ``apply_moe_ep_tp``, which lays them out.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator

import torch
import torch.distributed as dist
from torch import nn

from moediag.axes import EP, TP
from moediag.protocol import Trial

from . import titan_cpu
from .look_alike import colwise, replicated
from .plans import Cell, Plan

NOTES = titan_cpu.NOTES


def build(trial: Trial, cell: Cell) -> nn.Module:
    """Builds the model. Raises NotApplicable if torchtitan is missing or has another MoE."""
    release = titan_cpu.load()
    model = trial.model
    arguments = release.moe.MoEArgs(
        num_experts=model.experts,
        num_shared_experts=1,
        score_func="softmax",
        top_k=model.top_k,
        score_before_experts=cell.scores_before,
        use_grouped_mm=False,  # its grouped kernel computes in bfloat16 for every input type
        load_balance_coeff=None,
    )
    block: nn.Module = release.moe.MoE(arguments, dim=model.hidden, hidden_dim=model.intermediate)
    return block


def parallelize(model: Any, cell: Cell, plan: Plan, device: torch.device) -> None:
    """Shards the block of the only layer of ``model`` over all ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    release = titan_cpu.load()
    ranks = (dist.get_world_size(),)
    tp = init_device_mesh(device.type, ranks, mesh_dim_names=(str(TP),))
    ep = None
    if not cell.tensor_parallel:  # expert parallelism uses the same ranks
        ep = init_device_mesh(device.type, ranks, mesh_dim_names=(str(EP),))
    with _fixed(release.parallelize, plan):
        release.parallelize.apply_moe_ep_tp(model, tp, ep, None, None)
    block = model.layers["0"].moe
    if plan.boundary:
        block.register_forward_pre_hook(_parts_down)  # runs after the plan's own
    if plan.weights:
        _weights_partial(release, block.experts)


@contextlib.contextmanager
def _fixed(module: Any, plan: Plan) -> Iterator[None]:
    """Replaces the styles that the plan changes while ``apply_moe_ep_tp`` runs."""
    others = _styles(module, plan)
    own = {name: getattr(module, name) for name in others}
    for name, style in others.items():
        setattr(module, name, style)
    try:
        yield
    finally:
        for name, style in own.items():
            setattr(module, name, style)


def _styles(module: Any, plan: Plan) -> Dict[str, Any]:
    from torch.distributed.tensor import Partial

    class Gate(module.NoParallel):
        @staticmethod
        def _prepare_input_fn(layout: Any, desired: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
            return (replicated(inputs[0], mesh, summed=plan.gate_input), *inputs[1:])

        @staticmethod
        def _prepare_output_fn(layout: Any, local: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
            return outputs.to_local(grad_placements=(Partial(),))

    class Boundary(module.PrepareModuleInputOutput):
        def __init__(self, **options: Any) -> None:
            options["use_local_input"] = False
            super().__init__(**options)

    class Experts(module.TensorParallel):
        def _prepare_input_fn(self, mod: Any, inputs: Any, mesh: Any) -> Any:
            return inputs

    others: Dict[str, Any] = {}
    if plan.gate_output or not plan.gate_input:
        others["NoParallel"] = Gate
    if plan.boundary:
        others["PrepareModuleInputOutput"] = Boundary
    if not plan.routed_input:
        others["TensorParallel"] = Experts
    if not plan.shared_input:
        others["ColwiseParallel"] = lambda: colwise(plan)
    return others


def _parts_down(module: Any, inputs: Any) -> Any:
    from torch.distributed.tensor import Partial

    return (inputs[0].to_local(grad_placements=(Partial(),)), *inputs[1:])


def _weights_partial(release: Any, experts: Any) -> None:
    from torch.distributed.tensor import Partial

    def forward(x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (
            getattr(experts, name).to_local(grad_placements=(Partial(),))
            for name in ("w1", "w2", "w3")
        )
        out: torch.Tensor = release.moe._run_experts_for_loop(w1, w2, w3, x, tokens_per_expert)
        return out

    experts.forward = forward
