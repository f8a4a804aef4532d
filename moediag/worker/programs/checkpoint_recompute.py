"""Activation checkpointing under FSDP2 where the recomputation routes tokens otherwise.

Right is the gradient of the loss that was computed: the routing of the forward, without
checkpointing, in one process.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from moediag.protocol import GradientError, Outcome, Trial
from moediag.worker import checkpointing, compare, data, load, models, optimizers, replicas
from moediag.worker.rerouted import NOTES, Rerouted
from moediag.worker.step import finish
from moediag.worker.versions import versions
from moediag.worker.wrap import Wrapped, wrap


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """All steps of the trial. Raises NotApplicable, and what a backward raises."""
    assert trial.program is not None
    options = trial.program.options
    asked = load.known(trial.model.experts_implementation)
    model = models.build(trial.model, trial.step.seed, experts=asked).to(device)
    anatomy = models.anatomy(model, trial.model)
    if options["router"] == "outside":
        checkpointing.router_outside(anatomy)
    else:
        checkpointing.rewritten(anatomy, options["block"])
        checkpointing.enable(model, trial.step.checkpointing, options)
    right = Right(trial)
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
            tolerance = active.enter_context(checkpointing.tolerant_unpack(options["unpack"]))
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


class Told:
    """Notes of the run: an Outcome is only written by who reaches the end, events by all."""

    def __init__(self, wrapped: Wrapped, recorder: Any, *notes: str) -> None:
        self._wrapped = wrapped
        self._recorder = recorder
        for note in (*wrapped.notes, *filter(None, notes)):
            self(note)

    def __call__(self, note: str) -> None:
        if note not in self._wrapped.notes:
            self._wrapped.notes.append(note)
        if self._recorder is not None:
            self._recorder.event("note", keep=True, text=note)


def draw_anew(trial: Trial, rank: int, number: int) -> None:
    """What the forward of ``rank`` draws in step ``number`` is the same wherever it runs."""
    torch.manual_seed(trial.step.seed * 1_000_003 + rank * 10_007 + number * 101)


class Right:
    """The same training in one process, without sharding and checkpointing, every rank's batch in
    turn. ``losses`` and ``norms`` (before clipping) grow with each step."""

    def __init__(self, trial: Trial) -> None:
        assert trial.program is not None
        self._trial = trial
        self.model: nn.Module = models.build(
            trial.model, trial.step.seed, dtype="float32", experts="eager"
        )
        anatomy = models.anatomy(self.model, trial.model)
        self._wrapped = Wrapped(self.model, anatomy, trial)
        self._wrapped.optimizer = optimizers.build(self.model.parameters(), trial.step)
        # Only noise is part of the forward.
        kind = "noise" if trial.program.options["change"] == "noise" else "none"
        self._change = Rerouted(kind, anatomy.experts)
        self.losses: List[float] = []
        self.norms: List[float] = []

    def step(self, number: int) -> Dict[str, Optional[torch.Tensor]]:
        """The gradients of the next step by FQN (None: no batch reached it), on the CPU."""
        trial, total = self._trial, 0.0
        with self._change.installed():
            for rank in range(trial.world_size):
                draw_anew(trial, rank, number)
                loss = self._wrapped.loss(data.batch(trial, rank, number, 0)) / trial.world_size
                loss.backward()
                total += float(loss.detach())
        named = list(self.model.named_parameters())
        found = {name: None if p.grad is None else p.grad.clone() for name, p in named}
        limit = float("inf") if trial.step.clip is None else trial.step.clip
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        self.losses.append(total)
        self._wrapped.step()
        return found
