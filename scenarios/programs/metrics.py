"""Metrics that are all-reduced over the ranks beside gradient accumulation: where, how often, and
under which names.

The correct result is one process's: a rank's loss is the mean over its own micro-batches, the
step's loss the mean over ranks. A metric is the mean, over the ranks that have it, of their means
over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import Trial

from . import matrices

OPTIONS: Dict[str, Any] = {
    "reduce": ("inside", "after"),  # each micro-batch's | their mean, after the last
    "micro_batches": 3,
    "fewer": 0,  # by so many on odd ranks
    # What FSDP2 does in all but the last micro-batch: reduces gradients; keeps them; keeps
    # them and the gathered parameters too, so that nothing is communicated.
    "accumulation": ("every", "no-sync", "no-sync-gathered"),
    "pad": False,  # ranks agree on the largest number; a padding micro-batch has weight 0
    "keys": ("same", "one-missing", "other-order"),  # of odd ranks
    # Order of the names: in each rank's own order; sorted; all known names, 0 where a rank has
    # none; the same with the number of ranks that have it.
    "names": ("own-order", "sorted", "zero-for-missing", "counted"),
}

NAMES = ("loss", "kl", "entropy")
MISSING = "kl"
_LR = 1e-2
_LOOK_ALIKE = (
    "a look-alike of a trainer's loop: three matrices under FSDP2, one all_reduce per metric in "
    "the order of a dict"
)

Values = Dict[str, torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """One process's gradients, mean loss and metrics of each step."""

    gradients: List[Dict[str, torch.Tensor]]
    losses: List[float]
    metrics: List[Dict[str, float]]


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective: ends on all ranks, raises, or hangs."""
    trial, options, measured = collector.trial, collector.options, collector.measured
    with collector.recorder.paused():
        truth = single_process(trial, options)
    gathered = options["accumulation"] == "no-sync-gathered"
    model: Any = matrices.sharded(trial, collector.device, reshard_after_forward=not gathered)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    held = matrices.Held(model, optimizer, trial, PlainShards())
    collector.note(_LOOK_ALIKE)

    def optimize(number: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for number in collector.steps(held, optimize):
        reported = _step(collector, model, number)
        measured.losses.append(float(reported.pop("own loss")))
        measured.metrics[str(number)] = {name: float(value) for name, value in reported.items()}
        measured.reference_metrics[str(number)] = truth.metrics[number - 1]
        expected = truth.gradients[number - 1]
        measured.gradients[str(number)] = matrices.compare_gradients(model, expected)
    collector.set(reference_losses=truth.losses)
    dist.barrier()


def _step(collector: Collector, model: Any, number: int) -> Values:
    """Runs all micro-batches; returns the metrics as this rank reports them, and its "own loss"."""
    trial, rank, options = collector.trial, collector.rank, collector.options
    own = micro_batches(options, rank)
    collector.recorder.decision("micro-batches", own)
    collector.recorder.decision("metric", list(names(options, rank)))
    count = _largest(own, collector.device) if options["pad"] else own
    inside: List[Values] = []
    listed: List[Values] = []
    for micro in range(count):
        last = micro == count - 1
        if options["accumulation"] != "every":
            model.set_requires_gradient_sync(last)
        if options["accumulation"] == "no-sync-gathered":
            model.set_reshard_after_backward(last)
        padding = micro >= own
        inputs, targets = (
            part.to(collector.device)
            for part in matrices.batch(trial, rank, number, 0 if padding else micro)
        )
        loss, found = _forward(model, inputs, targets, names(options, rank))
        (loss * (0.0 if padding else 1.0 / own)).backward()
        if padding:
            continue
        listed.append(found)
        if options["reduce"] == "inside":
            inside.append(reduce(found, options["names"], trial.world_size))
    result = mean(inside) if inside else reduce(mean(listed), options["names"], trial.world_size)
    return {**result, "own loss": mean(listed)["loss"]}


def micro_batches(options: Dict[str, Any], rank: int) -> int:
    return int(options["micro_batches"]) - (int(options["fewer"]) if rank % 2 else 0)


def names(options: Dict[str, Any], rank: int) -> Sequence[str]:
    """Returns the metrics of ``rank`` in the order in which it computes them."""
    if rank % 2 and options["keys"] == "one-missing":
        return tuple(name for name in NAMES if name != MISSING)
    if rank % 2 and options["keys"] == "other-order":
        return NAMES[1:2] + NAMES[:1] + NAMES[2:]
    return NAMES


def _forward(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, wanted: Sequence[str]
) -> Any:
    """Returns the loss and the ``wanted`` metrics in order: fp32 scalars, without history."""
    output = model(inputs)
    loss = nn.functional.mse_loss(output, targets)
    log = torch.log_softmax(output.detach(), -1)
    to = torch.log_softmax(targets, -1)
    found = {
        "loss": loss.detach(),
        "kl": (log.exp() * (log - to)).sum(-1).mean(),
        "entropy": -(log.exp() * log).sum(-1).mean(),
    }
    return loss, {name: found[name] for name in wanted}


def mean(listed: Sequence[Values]) -> Values:
    """Returns means by name, over dicts of the same names."""
    return {name: torch.stack([v[name] for v in listed]).mean() for name in listed[0]}


def reduce(values: Values, how: str, world_size: int) -> Values:
    """Returns the mean over ranks by one all_reduce per metric, with this rank's names, or all
    known ones. Collective; only correct if all ranks issue the same number in the same order."""
    order = sorted(values) if how == "sorted" else list(values)
    if how in ("zero-for-missing", "counted"):
        order = sorted(NAMES)
    result: Values = {}
    some = next(iter(values.values()))
    for name in order:
        value = values.get(name, torch.zeros_like(some)).clone()
        holders = torch.full_like(some, float(world_size))
        if how == "counted":
            holders = torch.full_like(some, float(name in values))
            dist.all_reduce(holders)
        dist.all_reduce(value)
        result[name] = value / holders
    return result


def _largest(own: int, device: torch.device) -> int:
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def single_process(trial: Trial, options: Dict[str, Any]) -> Truth:
    """Runs the same training in one process."""
    model = matrices.Matrices(trial.step.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    truth = Truth([], [], [])
    for number in range(1, trial.step.steps + 1):
        ranks: List[Values] = []
        for rank in range(trial.world_size):
            own, listed = micro_batches(options, rank), []
            for micro in range(own):
                inputs, targets = matrices.batch(trial, rank, number, micro)
                loss, found = _forward(model, inputs, targets, names(options, rank))
                (loss / own / trial.world_size).backward()
                listed.append(found)
            ranks.append(mean(listed))
        truth.gradients.append(matrices.gradients(model))
        truth.losses.append(float(mean([{"loss": r["loss"]} for r in ranks])["loss"]))
        having = {name: [r for r in ranks if name in r] for name in NAMES}
        truth.metrics.append(
            {n: float(torch.stack([r[n] for r in those]).mean()) for n, those in having.items()}
        )
        optimizer.step()
        optimizer.zero_grad()
    return truth
