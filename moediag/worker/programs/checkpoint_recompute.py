"""Activation checkpointing under FSDP2 where the recomputation routes tokens otherwise.

Right is the gradient of the loss that was computed: the routing of the forward, without
checkpointing, in one process.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from moediag.protocol import GradientError, Outcome, Trial
from moediag.worker import data
from moediag.worker.measure import gradients as compare
from moediag.worker.measure import replicas
from moediag.worker.measure.program_reference import Right, Told
from moediag.worker.models import checkpoint, tiny
from moediag.worker.models.rerouted import NOTES, Rerouted
from moediag.worker.shard import activation_checkpointing
from moediag.worker.shard.wrap import wrap
from moediag.worker.tasks.step import finish
from moediag.worker.versions import versions


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """All steps of the trial. Raises NotApplicable, and what a backward raises."""
    assert trial.program is not None
    options = trial.program.options
    asked = checkpoint.known(trial.model.experts_implementation)
    model = tiny.build(trial.model, trial.step.seed, experts=asked).to(device)
    anatomy = tiny.anatomy(model, trial.model)
    if options["router"] == "outside":
        activation_checkpointing.router_outside(anatomy)
    else:
        activation_checkpointing.rewritten(anatomy, options["block"])
        activation_checkpointing.enable(model, trial.step.checkpointing, options)
    # Only noise is part of the forward.
    drawn = Rerouted("noise" if options["change"] == "noise" else "none", anatomy.experts)
    right = Right(trial, drawn.installed, lambda of, step: draw_anew(trial, of, step))
    wrapped = wrap(model, anatomy, trial)
    change = Rerouted(options["change"], anatomy.experts, options["pair"])
    told = Told(wrapped, recorder, NOTES[options["change"]])
    observer = replicas.Observer(wrapped, trial.world_size)
    gradients: Dict[str, Dict[str, GradientError]] = {}
    losses: List[float] = []
    norms: List[Optional[float]] = []
    here = options["change"] == "noise" or rank == options["on_rank"]
    with contextlib.ExitStack() as active:
        tolerance = None
        if options["unpack"] != "strict":
            tolerance = active.enter_context(
                activation_checkpointing.tolerant_unpack(options["unpack"])
            )
        for number in range(1, trial.step.steps + 1):
            if recorder is not None:
                recorder.step(number)
            expected = right.step(number)
            draw_anew(trial, rank, number)
            with change.installed(here):
                loss = wrapped.loss(data.batch(trial, rank, number, 0).to(device))
                wrapped.backward(loss)
            losses.append(float(loss.detach()))
            gradients[str(number)] = compare.compare(wrapped, expected)
            observer.before_clip()
            norms.append(finish(wrapped))
            observer.after_optimizer(number)
    if tolerance is not None and tolerance.replaced:
        told(f"{tolerance.replaced} saved tensors were replaced on rank {rank}")
    dist.barrier()
    return Outcome(
        rank=rank,
        gradients=gradients,
        losses=losses,
        reference_losses=right.losses,
        gradient_norms=norms,
        reference_norms=right.norms,
        replicas=observer.steps,
        steps_done=trial.step.steps,
        notes=wrapped.notes,
        versions=versions(),
    )


def draw_anew(trial: Trial, rank: int, number: int) -> None:
    """What the forward of ``rank`` draws in step ``number`` is the same wherever it runs."""
    torch.manual_seed(trial.step.seed * 1_000_003 + rank * 10_007 + number * 101)
