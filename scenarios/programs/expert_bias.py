"""Balance without an auxiliary loss: a bias per expert takes part in the choice of experts alone.
After each step it moves towards the experts that had fewer tokens than the mean. The correct bias
is one process's, which counts the tokens of all ranks once and goes on after a save and a load."""

from __future__ import annotations

from typing import Any, Dict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moediag.lab.step.collector import Collector
from moediag.lab.step.models.rerouted import recomputing

from . import matrices

OPTIONS: Dict[str, Any] = {
    "reduced": ("counts", "nothing", "bias"),  # counts are summed, or biases are averaged
    "rule": ("sign", "proportional"),  # of the difference to the mean count, or the difference
    # Activation checkpointing: no; the recomputation counts its tokens too; it does not.
    "recomputed": ("no", "counted", "not-counted"),
    "update": ("in-place", "new-tensor"),  # of what the checkpointer holds a reference to
    "saved_after": 0,  # the step after which the model is saved and loaded; 0: never
}

_EXPERTS, _TOP, _TOKENS, _RATE = 4, 1, 12, 0.2
_LOOK_ALIKE = (
    "a look-alike of a mixture of experts with a bias per expert: its weights are on all ranks, "
    "and DistributedDataParallel averages their gradients"
)
_SAVED = "after step {} the model was saved and loaded into a new one"


class Mixture(nn.Module):
    """``gate`` (experts, WIDTH), ``experts`` (experts, WIDTH, WIDTH), and ``bias`` (experts), which
    no gradient reaches. ``counts``: tokens of each expert since the last update."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width = matrices.WIDTH
        self.gate = nn.Parameter(torch.randn(_EXPERTS, width, generator=generator) / width**0.5)
        self.experts = nn.Parameter(
            torch.randn(_EXPERTS, width, width, generator=generator) / width**0.5
        )
        self.bias = nn.Parameter(torch.zeros(_EXPERTS), requires_grad=False)
        self.counts = torch.zeros(_EXPERTS)
        self.twice = False  # counts in a recomputation too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, WIDTH) to the same."""
        scores = F.linear(x, self.gate).sigmoid()
        chosen = (scores.detach() + self.bias).topk(_TOP, -1).indices
        if self.twice or not recomputing():
            counted = F.one_hot(chosen, _EXPERTS).sum((0, 1)).float()
            self.counts = self.counts.to(counted) + counted
        hot = F.one_hot(chosen, _EXPERTS).sum(1).to(scores)
        every = torch.einsum("tw,evw->tev", x, self.experts)
        return ((scores * hot).unsqueeze(-1) * every).sum(1)

    def update(self, how: str) -> None:
        """Moves the bias. ``how``: the option ``rule``."""
        step = self.counts.mean() - self.counts
        step = step.sign() if how == "sign" else step / _TOKENS
        self.bias.data += _RATE * (step - step.mean())
        self.counts = torch.zeros_like(self.counts)


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective."""
    trial, options = collector.trial, collector.options
    collector.note(_LOOK_ALIKE)
    model, alone = Mixture(trial.step.seed).to(collector.device), Mixture(trial.step.seed)
    model.twice = options["recomputed"] == "counted"
    saved_at = options["saved_after"]
    if saved_at:
        collector.note(_SAVED.format(saved_at))
    # The checkpointer's own references, taken before training.
    tracked: Dict[str, Any] = dict(model.state_dict(keep_vars=True))
    wrapped = nn.parallel.DistributedDataParallel(model)

    def loss(of: nn.Module, rank: int, number: int, again: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(trial.step.seed + rank * 10_007 + number)
        # Ranks see other tokens, so that an expert that one of them prefers is rare on others.
        x = torch.randn(_TOKENS, matrices.WIDTH, generator=generator) + 0.5 * rank
        y = torch.randn(_TOKENS, matrices.WIDTH, generator=generator)
        x, y = x.to(next(of.parameters()).device), y.to(next(of.parameters()).device)
        out: Any = checkpoint(of, x, use_reentrant=False) if again else of(x)
        return F.mse_loss(out, y)

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        found = matrices.trained(loss(of, rank, number, options["recomputed"] != "no"))
        if options["reduced"] == "counts":
            dist.all_reduce(model.counts)
        model.update(options["rule"])
        if options["reduced"] == "bias":
            dist.all_reduce(model.bias.data)
            model.bias.data /= trial.world_size
        if options["update"] == "new-tensor":
            model.bias = nn.Parameter(model.bias.data.clone(), requires_grad=False)
        if number == saved_at:
            model.load_state_dict({name: value.clone() for name, value in tracked.items()})
        return found

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        found = matrices.trained(loss(of, rank, number, False), trial.world_size)
        if rank == trial.world_size - 1:
            alone.update(options["rule"])
        return found

    matrices.train(collector, wrapped, backward, alone, right)
