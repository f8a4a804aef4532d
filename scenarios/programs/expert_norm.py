"""The gradient norm under tensor parallelism with experts that are on other axes than the rest. All
ranks work on the same tokens; the gradients are right in every variant, only the norm differs."""

from __future__ import annotations

from typing import Any, Dict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moediag.axes import TP
from moediag.lab.step.collector import Collector
from moediag.lab.step.shard import clipping, sums
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

from . import matrices

OPTIONS: Dict[str, Any] = {
    "experts": ("whole", "cut"),  # each on one of those ranks; or a piece of each on every rank
    # Gradients that a rank counts before the sum over ranks: those that are cut, and all on the
    # first rank; all on every rank; each element on one of the ranks that have it.
    "counted": ("cut-or-first", "every-rank", "by-placement"),
}

_EXPERTS, _TOKENS = 4, 24
_LOOK_ALIKE = (
    "a look-alike of a mixture of experts under tensor parallelism: a norm's scale on all ranks, a "
    "dense matrix cut over them, and experts"
)


class Model(nn.Module):
    """``scale`` (WIDTH), ``dense`` (WIDTH, WIDTH), ``experts`` (experts, WIDTH, WIDTH)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width = matrices.WIDTH
        self.scale = nn.Parameter(torch.ones(width))
        self.dense = nn.Parameter(torch.randn(width, width, generator=generator) / width**0.5)
        self.experts = nn.Parameter(
            torch.randn(_EXPERTS, width, width, generator=generator) / width**0.5
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, WIDTH) to the same. Token i goes to expert i modulo their number."""
        dense, experts = self.dense, self.experts
        hidden = torch.tanh(_cut(x * self.scale, dense, lambda h, part: h @ part.T))
        chosen = torch.arange(x.shape[0], device=x.device) % _EXPERTS

        def each(h: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            first = 0
            if pieces.distributed(experts) and experts.placements[0].dim == 0:
                first = dist.get_rank() * part.shape[0]
            hot = nn.functional.one_hot(chosen, _EXPERTS)[:, first : first + part.shape[0]]
            return torch.einsum("te,eow,tw->to", hot.to(h), part, h)

        return _cut(hidden, experts, each)


def _cut(hidden: torch.Tensor, weight: Any, product: Any) -> torch.Tensor:
    """Returns ``product(hidden, weight)``; of a cut weight the sum of all ranks' parts, each at its
    place among the output's features."""
    if not pieces.distributed(weight):
        whole: torch.Tensor = product(hidden, weight)
        return whole
    part = product(sums.copied(hidden), weight.to_local())
    at = dist.get_rank() * part.shape[1] if part.shape[1] < matrices.WIDTH else 0
    padding = (at, matrices.WIDTH - at - part.shape[1])
    return sums.summed(nn.functional.pad(part, padding))


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective. Raises NotApplicable."""
    trial, options = collector.trial, collector.options
    if _EXPERTS % trial.world_size:
        raise NotApplicable(f"{_EXPERTS} experts cannot be divided over {trial.world_size} ranks")
    collector.note(_LOOK_ALIKE)
    model, alone = Model(trial.step.seed), Model(trial.step.seed)
    mesh = init_device_mesh(collector.device.type, (trial.world_size,), mesh_dim_names=(str(TP),))
    dims = {"dense": 0, "experts": 1 if options["experts"] == "cut" else 0}
    model.to(collector.device)
    for name, dim in dims.items():
        part = distribute_tensor(getattr(model, name).detach(), mesh, [Shard(dim)])
        setattr(model, name, nn.Parameter(part))

    def loss(of: nn.Module, number: int, share: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(trial.step.seed * 10_007 + number)
        device = next(of.parameters()).device
        shape = (2, _TOKENS, matrices.WIDTH)
        x, y = torch.randn(shape, generator=generator).to(device)
        return matrices.trained(nn.functional.mse_loss(of(x), y), share)

    def clip(of: nn.Module, limit: float) -> float:
        gradients = {n: p.grad for n, p in of.named_parameters() if p.grad is not None}
        total = _norm(gradients, options)
        for gradient in gradients.values():
            pieces.local(gradient).mul_(min(limit / (total + 1e-6), 1.0))
        return total

    matrices.train(
        collector,
        model,
        lambda of, rank, number: loss(of, number, 1),
        alone,
        lambda of, rank, number: loss(of, number, trial.world_size),
        clip,
    )


def _norm(gradients: Dict[str, Any], options: Dict[str, Any]) -> float:
    if options["counted"] == "by-placement":
        return clipping.per_mesh_norm(gradients, PlainShards())
    cut = {"dense"} | ({"experts"} if options["experts"] == "cut" else set())
    everything = options["counted"] == "every-rank" or dist.get_rank() == 0
    counted = [g for name, g in gradients.items() if everything or name in cut]
    square = clipping.local_norm(counted) ** 2
    dist.all_reduce(square)
    return float(square.sqrt())
