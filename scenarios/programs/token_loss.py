"""A loss over tokens of which the ranks have unequal numbers, and an auxiliary loss that is a mean
already: what each is divided by. The correct result is the mean over the tokens of all ranks, plus
the mean over ranks of the auxiliary loss."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector
from moediag.protocol import Trial

from . import matrices

OPTIONS: Dict[str, Any] = {
    "tokens": ("unequal", "equal"),
    # What a rank's sum is divided by; gradients are then averaged over ranks: its own tokens;
    # those of each micro-batch; those of all ranks; the same, times the number of ranks.
    "divide": ("own-tokens", "micro-batch", "all-tokens", "all-tokens-times-ranks"),
    # An auxiliary loss that is a mean already: none; added before the factor; added after it.
    "aux": ("none", "with-the-loss", "apart"),
}

_AUX = 0.5  # its coefficient
_LOOK_ALIKE = (
    "a look-alike of a trainer's loop: three matrices under FSDP2, whose rows are the tokens; the "
    "auxiliary loss is the mean square of the output"
)


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective."""
    trial, options = collector.trial, collector.options
    collector.note(_LOOK_ALIKE)
    micros, world = trial.step.accumulate, trial.world_size
    model, alone = matrices.Matrices(trial.step.seed), matrices.Matrices(trial.step.seed)
    matrices.shard(model, trial, collector.device)

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        """FSDP2 averages over ranks what each of them computes here."""
        counts = [_count(options, rank, micro) for micro in range(micros)]
        tokens = torch.tensor(float(sum(counts)), device=collector.device)
        if options["divide"] in ("all-tokens", "all-tokens-times-ranks"):
            dist.all_reduce(tokens)
        total = torch.zeros((), device=collector.device)
        for micro, count in enumerate(counts):
            summed, aux = _forward(of, trial, rank, number, micro, count)
            by = {"micro-batch": count * micros}.get(options["divide"], float(tokens))
            times = world if options["divide"] == "all-tokens-times-ranks" else 1
            share = _AUX * aux / micros if options["aux"] != "none" else 0.0
            inside = share if options["aux"] == "with-the-loss" else 0.0
            apart = share if options["aux"] == "apart" else 0.0
            loss = (summed / by + inside) * times + apart
            loss.backward()
            total += loss.detach()
        return total

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        tokens = sum(_count(options, r, m) for r in range(world) for m in range(micros))
        total = torch.zeros(())
        for micro in range(micros):
            count = _count(options, rank, micro)
            summed, aux = _forward(of, trial, rank, number, micro, count)
            loss = summed / tokens
            if options["aux"] != "none":
                loss = loss + _AUX * aux / (micros * world)
            loss.backward()
            total += loss.detach() * world  # the mean over ranks is the loss
        return total

    matrices.train(collector, model, backward, alone, right)


def _count(options: Dict[str, Any], rank: int, micro: int) -> int:
    """Returns how many of a micro-batch's rows have a label."""
    if options["tokens"] == "equal":
        return matrices.SAMPLES
    return 1 + (3 * rank + 2 * micro) % matrices.SAMPLES


def _forward(
    model: nn.Module, trial: Trial, rank: int, number: int, micro: int, count: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the tokens' losses and the auxiliary loss."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in matrices.batch(trial, rank, number, micro))
    output = model(inputs)
    each = (output - targets).square().mean(-1)
    return each[:count].sum(), output.square().mean()
