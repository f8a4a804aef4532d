"""The training step under test on one rank: forward, backward, compare, clip, optimizer."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from moediag.protocol import GradientError, Outcome, Trial
from moediag.worker import compare, data, models, reference
from moediag.worker.skew import RouterSkew
from moediag.worker.versions import versions
from moediag.worker.wrap import Wrapped, wrap


def prepare(trial: Trial, device: torch.device) -> Wrapped:
    """The wrapped model on ``device``. Raises NotApplicable, on all ranks alike."""
    model = models.build(trial.model, trial.step.seed)
    anatomy = models.anatomy(model, trial.model)
    model = model.to(device)
    checkpoint(model, trial.step.checkpointing)
    return wrap(model, anatomy, trial)


def checkpoint(model: nn.Module, kind: str) -> None:
    """``kind``: none | reentrant | non-reentrant, through transformers' own switch."""
    if kind == "none":
        return
    switchable: Any = model
    switchable.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"}
    )


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """All steps; returns what was measured. Collective: ends on all ranks, or raises, or hangs,
    which is what the trial is there to find out."""
    wrapped = prepare(trial, device)
    expected = reference.load(trial.reference_path) if trial.reference_path else None
    skew = RouterSkew(trial.skew, wrapped.anatomy.experts)
    skew.set_rank(rank)
    gradients: Dict[str, Dict[str, GradientError]] = {}
    losses: List[float] = []
    norms: List[Optional[float]] = []
    seconds: List[float] = []
    with skew.installed(wrapped.anatomy):
        for number in range(1, trial.step.steps + 1):
            if recorder is not None:
                recorder.step(number)
            skew.set_step(number)
            began = time.perf_counter()
            losses.append(forward_backward(wrapped, rank, number, device))
            seconds.append(time.perf_counter() - began)
            if expected is not None:
                gradients[str(number)] = compare.compare(
                    wrapped, expected["gradients"][number - 1], trial.model.dtype
                )
            norms.append(finish(wrapped))
    dist.barrier()
    return Outcome(
        rank=rank,
        gradients=gradients,
        losses=losses,
        reference_losses=expected["losses"] if expected is not None else [],
        gradient_norms=norms,
        steps_done=trial.step.steps,
        step_seconds=seconds,
        notes=wrapped.notes,
        versions=versions(),
    )


def forward_backward(wrapped: Wrapped, rank: int, number: int, device: torch.device) -> float:
    """All micro-batches of one step; returns this rank's mean loss."""
    trial = wrapped.trial
    total = 0.0
    for micro in range(trial.step.accumulate):
        tokens = data.batch(trial.model, trial.step, trial.skew, rank, number, micro).to(device)
        with wrapped.accumulating(last=micro == trial.step.accumulate - 1):
            loss = wrapped.loss(tokens) / trial.step.accumulate
            wrapped.backward(loss)
        total += float(loss.detach())
    return total


def finish(wrapped: Wrapped) -> Optional[float]:
    """Clip and optimizer step; returns the gradient norm before clipping (None: not known)."""
    limit: Optional[float] = wrapped.trial.step.clip
    norm = None if limit is None else wrapped.clip(limit)
    wrapped.step()
    return norm
