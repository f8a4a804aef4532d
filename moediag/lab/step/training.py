"""Training steps of a wrapped model, compared with a single process."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any, Callable, ContextManager, Dict, List, Optional

import torch
import torch.distributed as dist

from moediag.lab.step import data
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import gradients
from moediag.lab.step.measure.block_inputs import InputGradients
from moediag.lab.step.measure.reference import Right
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard import optimizers
from moediag.lab.step.shard.wrapped import Wrapped


def train(
    collector: Collector,
    wrapped: Wrapped,
    expected: Optional[Dict[str, Any]],
    held: Dict[str, List[int]],
) -> None:
    """Runs all steps of a wrapped model. ``expected``: the reference's results, see
    reference.compute; None compares nothing. ``held``: see gradients.compare. Collective."""
    rank, measured = collector.rank, collector.measured
    skew = RouterSkew(wrapped.trial.skew, wrapped.anatomy.experts)
    skew.set_rank(rank)
    record_optimizer(collector, wrapped)
    with skew.installed(wrapped.anatomy), InputGradients(wrapped.anatomy) as kept:
        for number in collector.steps(wrapped, optimizing(collector, wrapped), skew):
            began = time.perf_counter()
            loss = forward_backward(wrapped, rank, number, collector.device)
            measured.losses.append(loss)
            measured.step_seconds.append(time.perf_counter() - began)
            if expected is not None:
                of_inputs = expected["inputs"][number - 1][rank]
                measured.inputs[str(number)] = gradients.inputs(wrapped, kept.take(), of_inputs)
                rounding = expected.get("rounding")
                measured.gradients[str(number)] = gradients.compare(
                    wrapped,
                    expected["gradients"][number - 1],
                    held,
                    rounding[number - 1] if rounding else None,
                )
    if expected is not None:
        collector.set(reference_losses=expected["losses"], reference_norms=expected["norms"])
        if "moved" in expected:
            last = str(wrapped.trial.step.steps)
            measured.updates[last] = gradients.updates(wrapped, expected, held)
    dist.barrier()


def train_beside(
    collector: Collector,
    wrapped: Wrapped,
    right: Right,
    around: Callable[[int], ContextManager[Any]] = lambda number: contextlib.nullcontext(),
    after: Callable[[int], None] = lambda number: None,
) -> None:
    """Runs all steps of a wrapped model, one batch each, and compares them with those of ``right``.
    ``around(number)``: a context for forward and backward of a step; ``after`` is called behind the
    optimizer's."""
    measured, optimize = collector.measured, optimizing(collector, wrapped)

    def optimize_and_more(number: int) -> None:
        optimize(number)
        after(number)

    for number in collector.steps(wrapped, optimize_and_more):
        expected = right.step(number)
        with around(number):
            tokens = data.batch(wrapped.trial, collector.rank, number, 0)
            loss = wrapped.loss(tokens.to(collector.device))
            wrapped.backward(loss)
        measured.losses.append(float(loss.detach()))
        measured.gradients[str(number)] = gradients.compare(wrapped, expected)
    collector.set(reference_losses=right.losses, reference_norms=right.norms)


def optimizing(collector: Collector, wrapped: Wrapped) -> Callable[[int], None]:
    """Returns a function that clips, steps the optimizer, and stores the norm before clipping."""

    def optimize(number: int) -> None:
        collector.measured.gradient_norms.append(finish(wrapped))

    return optimize


def record_optimizer(collector: Collector, wrapped: Wrapped) -> None:
    """Records parameter groups that one call cannot process, before the step that raises."""
    for found in optimizers.findings(wrapped.optimizer):
        collector.recorder.finding(optimizers.FINDING, found.text, **dataclasses.asdict(found))


def forward_backward(wrapped: Wrapped, rank: int, number: int, device: torch.device) -> float:
    """Runs all micro-batches of one step; returns this rank's mean loss."""
    micros = range(wrapped.trial.step.accumulate)
    batches = [data.batch(wrapped.trial, rank, number, micro).to(device) for micro in micros]
    return wrapped.forward_backward(batches)


def finish(wrapped: Wrapped) -> Optional[float]:
    """Clips and steps the optimizer; returns the gradient norm before clipping (None: unknown)."""
    limit: Optional[float] = wrapped.trial.step.clip
    norm = None if limit is None else wrapped.clip(limit)
    wrapped.step()
    return norm
