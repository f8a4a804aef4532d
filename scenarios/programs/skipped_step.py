"""One step has a gradient that is not finite: which ranks detect it, what each does instead of the
step, and whether that equals no step at all.

The correct result is that of a single process that leaves weights, optimizer and learning rate
unchanged in that step. The overflow is artificial, since so small a model does not overflow by
itself: rank 0's loss is scaled to infinity, or one column of its gradient inside the model becomes
infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import replicas
from moediag.lab.step.shard import clipping
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import Applied, GradientError, Trial
from moediag.recorder.not_applicable import NotApplicable

from . import matrices

OPTIONS: Dict[str, Any] = {
    "optimizer": ("adamw", "sgd", "muon"),  # sgd with momentum; muon: torch.optim.Muon
    # Where it overflows: rank 0's loss, one row of one parameter (its shard is the last
    # rank's), or nowhere.
    "overflow": ("loss", "one-row", "none"),
    "at": 2,  # in this step
    "norm": ("global", "own-shards"),  # which norm must be finite
    "agree": False,  # ranks skip when any of them found it not finite
    # Instead of the step: return; zero_grad() and step(); zero_grad(set_to_none=False) and
    # step(); nothing, the step as it is.
    "answer": ("return", "none-then-step", "zeros-then-step", "step"),
    "schedule": ("with-updates", "always"),  # when the scheduler advances
}

DECISION = "optimizer step"
TOOK = "took optimizer.step()"
_MADE = "the overflow is put in: {}"
_WHERE = {
    "loss": "rank 0's loss of step {} is scaled to infinity before backward",
    "one-row": "in step {} one row of first.weight's gradient is infinite on rank 0; "
    "the last rank holds its shard",
}
_LR = {"adamw": 2e-2, "sgd": 5e-2, "muon": 2e-2}
_DECAY = 0.9  # of the learning rate, per step of the schedule


@dataclass(frozen=True)
class Truth:
    """One process's values after each step: gradients (None if not finite) and mean loss of the
    step, weights, learning rate, number of updates; and the weights before training."""

    gradients: List[Optional[Dict[str, torch.Tensor]]]
    losses: List[float]
    weights: List[Dict[str, torch.Tensor]]
    rates: List[float]
    updates: List[float]
    start: Dict[str, torch.Tensor]


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective: ends on all ranks, raises, or hangs."""
    trial, options, measured = collector.trial, collector.options, collector.measured
    with collector.recorder.paused():
        truth = single_process(trial, options)
    model = matrices.sharded(trial, collector.device)
    optimizer = make_optimizer(model, options["optimizer"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
    held = matrices.Held(model, optimizer, trial, PlainShards())
    if options["overflow"] != "none":
        where = _WHERE[options["overflow"]].format(options["at"])
        collector.note(_MADE.format(where))

    def optimize(number: int) -> None:
        norm = _norm(model, options["norm"])
        # Only a global norm is the same on all ranks, and a non-finite one scales nothing.
        shared = options["norm"] == "global" and math.isfinite(norm)
        measured.gradient_norms.append(norm if shared else None)
        _apply(collector, optimizer, schedule, norm)
        optimizer.zero_grad()
        measured.applied[str(number)] = _applied(model, optimizer, truth, number, options)

    for number in collector.steps(held, optimize):
        loss = _backward(model, trial, options, collector.rank, number, collector.device)
        measured.losses.append(float(loss))
        expected = truth.gradients[number - 1]
        if expected is not None:
            measured.gradients[str(number)] = matrices.compare_gradients(
                model, expected, options["optimizer"]
            )
    collector.set(reference_losses=truth.losses)
    dist.barrier()


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Returns the optimizer. Raises NotApplicable if this torch has no Muon."""
    lr = _LR[name]
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise NotApplicable(f"torch {torch.__version__} has no torch.optim.Muon (2.9 on)")
    made: torch.optim.Optimizer = muon(model.parameters(), lr=lr)
    return made


def _overflows(options: Dict[str, Any], rank: int, number: int) -> bool:
    return options["overflow"] != "none" and rank == 0 and number == options["at"]


def _backward(
    model: nn.Module,
    trial: Trial,
    options: Dict[str, Any],
    rank: int,
    number: int,
    device: torch.device,
) -> torch.Tensor:
    """Runs forward and backward of ``rank``'s batch; returns its loss."""
    bad = _overflows(options, rank, number)
    row = matrices.WIDTH - 1 if bad and options["overflow"] == "one-row" else None
    inputs, targets = (part.to(device) for part in matrices.batch(trial, rank, number))
    loss = nn.functional.mse_loss(model(inputs, row), targets)
    scaled = bad and options["overflow"] == "loss"
    loss.backward(torch.full_like(loss, float("inf")) if scaled else None)
    return loss.detach()


def _norm(model: nn.Module, whose: str) -> float:
    """Returns torch's norm over all ranks (nothing is clipped: the limit is infinite), or that of
    this rank's shards alone."""
    if whose == "own-shards":
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return float(clipping.local_norm(grads))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _apply(
    collector: Collector, optimizer: torch.optim.Optimizer, schedule: Any, norm: float
) -> None:
    """Runs the step, or what the program does instead."""
    options = collector.options
    bad = not math.isfinite(norm)
    if options["agree"]:
        flag = torch.tensor(float(bad), device=collector.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        bad = bool(flag)
    answer = options["answer"] if bad else "step"
    collector.recorder.decision(DECISION, _words(answer, options["agree"]) if bad else TOOK)
    if answer in ("none-then-step", "zeros-then-step"):
        optimizer.zero_grad(set_to_none=answer == "none-then-step")
    if answer != "return":
        optimizer.step()
    if not bad or options["schedule"] == "always":
        schedule.step()


def _words(answer: str, agreed: bool) -> str:
    why = "gradient norm not finite" + (" on some rank" if agreed else "")
    return {
        "return": f"skipped optimizer.step() ({why})",
        "none-then-step": f"called zero_grad(), then optimizer.step() ({why})",
        "zeros-then-step": f"called zero_grad(set_to_none=False), then optimizer.step() ({why})",
        "step": f"took optimizer.step() all the same ({why})",
    }[answer]


def _applied(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    truth: Truth,
    number: int,
    options: Dict[str, Any],
) -> Applied:
    found: Dict[str, GradientError] = matrices.compare_weights(
        model, truth.weights[number - 1], truth.start, options["optimizer"]
    )
    counts = replicas.step_counts(optimizer)
    return Applied(
        weights=found,
        rate=replicas.learning_rates(optimizer)[0],
        reference_rate=truth.rates[number - 1],
        updates=max(counts) if counts else None,
        reference_updates=truth.updates[number - 1] if counts else None,
    )


def single_process(trial: Trial, options: Dict[str, Any]) -> Truth:
    """Runs the same training in one process: uses the gradient of the mean over ranks, and a step
    with a non-finite gradient changes nothing."""
    model = matrices.Matrices(trial.step.seed)
    optimizer = make_optimizer(model, options["optimizer"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
    truth = Truth([], [], [], [], [], matrices.weights(model))
    updates = 0
    cpu = torch.device("cpu")
    for number in range(1, trial.step.steps + 1):
        ranks = range(trial.world_size)
        losses = [_backward(model, trial, options, rank, number, cpu) for rank in ranks]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= trial.world_size
        found: Optional[Dict[str, torch.Tensor]] = matrices.gradients(model)
        if not all(bool(torch.isfinite(g).all()) for g in (found or {}).values()):
            found = None
        else:
            optimizer.step()
            schedule.step()
            updates += 1
        optimizer.zero_grad()
        truth.gradients.append(found)
        truth.losses.append(float(sum(losses)) / len(losses))
        truth.weights.append(matrices.weights(model))
        truth.rates.append(replicas.learning_rates(optimizer)[0])
        truth.updates.append(float(updates))
    return truth
