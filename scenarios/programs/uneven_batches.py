"""Ranks with unequal numbers of batches: in the loop of a validation under FSDP2, whose forward is
collective, or as micro-batches of torch's pipeline. The correct result is one process's over all
batches."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector

from . import matrices

OPTIONS: Dict[str, Any] = {
    "loop": ("validation", "pipeline"),
    "batches": 4,
    "fewer": 1,  # on odd ranks
    # When a rank ends its loop: after its own batches; when any rank has no more; when no rank
    # has any, and a rank without one runs an old one that does not count.
    "until": ("own", "any-ends", "all-end"),
}

_LOOK_ALIKE = (
    "a look-alike of a trainer's loop: matrices, under FSDP2 with a validation after each step, or "
    "one of them per stage of torch's ScheduleGPipe"
)
_VALIDATION = 1_000  # the first micro-batch of the validation set


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective: ends on all ranks, raises, or hangs."""
    collector.note(_LOOK_ALIKE)
    collector.recorder.decision("batches", _own(collector, collector.rank))
    {"validation": _validating, "pipeline": _pipelined}[collector.options["loop"]](collector)


def _own(collector: Collector, rank: int) -> int:
    options = collector.options
    return int(options["batches"]) - (int(options["fewer"]) if rank % 2 else 0)


def _agreed(collector: Collector) -> int:
    """Returns the number of turns of this rank's loop. Collective unless each ends by itself."""
    count = torch.tensor(_own(collector, collector.rank), device=collector.device)
    until = collector.options["until"]
    if until != "own":
        dist.all_reduce(count, dist.ReduceOp.MIN if until == "any-ends" else dist.ReduceOp.MAX)
    return int(count)


# -- validation ----------------------------------------------------------------------------


def _validating(collector: Collector) -> None:
    trial, measured = collector.trial, collector.measured
    model, alone = matrices.Matrices(trial.step.seed), matrices.Matrices(trial.step.seed)
    matrices.shard(model, trial, collector.device)

    def loss(of: nn.Module, rank: int, number: int, micro: int = 0) -> torch.Tensor:
        device = next(of.parameters()).device
        inputs, targets = (p.to(device) for p in matrices.batch(trial, rank, number, micro))
        return nn.functional.mse_loss(of(inputs), targets)

    def validation(of: nn.Module, rank: int, turns: int) -> torch.Tensor:
        """Returns the sum over a rank's batches, and their number."""
        found = torch.zeros(2, device=next(of.parameters()).device)
        own = _own(collector, rank)
        with torch.no_grad():
            for turn in range(turns):
                one = loss(of, rank, 0, _VALIDATION + min(turn, own - 1))
                if turn < own:
                    found += torch.stack([one, torch.ones_like(one)])
        return found

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        found = validation(of, rank, _agreed(collector))
        dist.all_reduce(found)
        measured.metrics[str(number)] = {"validation loss": float(found[0] / found[1])}
        return matrices.trained(loss(of, rank, number))

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        if rank == 0:
            ranks = range(trial.world_size)
            found = sum(validation(of, r, _own(collector, r)) for r in ranks)
            assert isinstance(found, torch.Tensor)
            mean = {"validation loss": float(found[0] / found[1])}
            measured.reference_metrics[str(number)] = mean
        return matrices.trained(loss(of, rank, number), trial.world_size)

    matrices.train(collector, model, backward, alone, right)


# -- pipeline ------------------------------------------------------------------------------


class Chain(nn.Module):
    """Matrices one after the other, ``layers.0`` and on."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        width = matrices.WIDTH
        self.layers = nn.ModuleDict(
            {str(i): nn.Linear(width, width, bias=False) for i in range(count)}
        )
        matrices.fill(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def _pipelined(collector: Collector) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    trial, rank, world = collector.trial, collector.rank, collector.trial.world_size
    stage, alone = Chain(trial.step.seed, world), Chain(trial.step.seed, world)
    for other in set(stage.layers) - {str(rank)}:
        del stage.layers[other]
    stage.to(collector.device)
    made = PipelineStage(stage, rank, world, collector.device)
    last = world - 1

    def batches(number: int, count: int) -> List[torch.Tensor]:
        """Returns inputs and targets, of ``count`` micro-batches each."""
        generator = torch.Generator().manual_seed(trial.step.seed * 10_007 + number)
        shape = (2, int(collector.options["batches"]), matrices.SAMPLES, matrices.WIDTH)
        both = torch.randn(shape, generator=generator)[:, :count].flatten(1, 2)
        return [part.to(collector.device) for part in both]

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        count = _agreed(collector)
        inputs, targets = batches(number, count)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(output, target) / count

        schedule = ScheduleGPipe(made, count, loss_fn=loss, scale_grads=False)
        losses: List[torch.Tensor] = []
        ends: Any = {"target": targets, "losses": losses} if rank == last else {}
        schedule.step(*([inputs] if rank == 0 else []), **ends)
        found = torch.zeros((), device=collector.device)
        if rank == last:
            found += torch.stack([one.detach() for one in losses]).sum()
        dist.broadcast(found, last)
        return found

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        inputs, targets = (part.cpu() for part in batches(number, _own(collector, 0)))
        return matrices.trained(nn.functional.mse_loss(of(inputs), targets), world)

    matrices.train(collector, stage, backward, alone, right)
