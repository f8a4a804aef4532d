"""The training step under test on one rank: forward, backward, compare, clip, optimizer."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from moediag.protocol import GradientError, Multiple, Outcome, Trial
from moediag.worker import data, optimizers
from moediag.worker.measure import gradients as compare
from moediag.worker.measure import ownership, reference, replicas
from moediag.worker.measure.block_inputs import InputGradients
from moediag.worker.models import checkpoint as load
from moediag.worker.models import tiny
from moediag.worker.models.skew import RouterSkew
from moediag.worker.shard import expert_parallel
from moediag.worker.shard.wrap import wrap
from moediag.worker.shard.wrapped import Wrapped, ep_rank
from moediag.worker.versions import versions

Told = Callable[[str, nn.Module, tiny.Anatomy], None]


def prepare(trial: Trial, device: torch.device, told: Optional[Told] = None) -> Wrapped:
    """The wrapped model on ``device``. ``told(when, model, anatomy)`` is called once it is
    ``loaded`` and once it is ``prepared``. Raises NotApplicable, on all ranks alike."""
    if trial.model.source == "checkpoint":
        expert_parallel.launch_environment(trial)
        model = load.from_checkpoint(trial, device)
    else:
        asked = load.known(trial.model.experts_implementation)
        model = tiny.build(trial.model, trial.step.seed, experts=asked).to(device)
    anatomy = tiny.anatomy(model, trial.model)
    if told is not None:
        told(
            "loaded by rank 0" if expert_parallel.only_rank_0_loads(trial) else "loaded",
            model,
            anatomy,
        )
    checkpoint(model, trial.step.checkpointing)
    wrapped = wrap(model, anatomy, trial)
    wrapped.plain_shards = replicas.plain_experts(wrapped)
    wrapped.notes += load.notes(trial)
    if told is not None and trial.model.source == "checkpoint":
        with wrapped.gathered():
            told("prepared", wrapped.model, wrapped.anatomy)
    return wrapped


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
    if trial.step.fill_uninitialized:
        fill_uninitialized()
    expected = reference.load(trial.reference_path) if trial.reference_path else None
    weights = Weights(trial, recorder, expected)
    wrapped = prepare(trial, device, weights.told)
    if recorder is not None:
        for note in wrapped.notes:
            # An Outcome is only written by who reaches the end.
            recorder.event("note", keep=True, text=note)
    return train(wrapped, expected, rank, recorder, device, weights.held)


def train(
    wrapped: Wrapped,
    expected: Optional[Dict[str, Any]],
    rank: int,
    recorder: Any,
    device: torch.device,
    held: Dict[str, List[int]],
) -> Outcome:
    """All steps of a wrapped model. ``expected``: the reference's, see reference.compute; None
    compares nothing. ``held``: see compare.compare. Collective."""
    trial = wrapped.trial
    skew = RouterSkew(trial.skew, wrapped.anatomy.experts)
    skew.set_rank(rank)
    gradients: Dict[str, Dict[str, GradientError]] = {}
    inputs: Dict[str, Dict[str, GradientError]] = {}
    losses: List[float] = []
    norms: List[Optional[float]] = []
    seconds: List[float] = []
    observer = replicas.Observer(wrapped, trial.world_size)
    tell_optimizer(wrapped, recorder)
    with skew.installed(wrapped.anatomy), InputGradients(wrapped.anatomy) as kept:
        for number in range(1, trial.step.steps + 1):
            if recorder is not None:
                recorder.step(number)
            skew.set_step(number)
            began = time.perf_counter()
            losses.append(forward_backward(wrapped, rank, number, device))
            seconds.append(time.perf_counter() - began)
            if expected is not None:
                of_inputs = expected["inputs"][number - 1][rank]
                inputs[str(number)] = compare.inputs(wrapped, kept.take(), of_inputs)
                rounding = expected.get("rounding")
                gradients[str(number)] = compare.compare(
                    wrapped,
                    expected["gradients"][number - 1],
                    held,
                    rounding[number - 1] if rounding else None,
                )
            observer.before_clip()
            norms.append(finish(wrapped))
            observer.after_optimizer(number)
    updates: Dict[str, Dict[str, Multiple]] = {}
    if expected is not None and "moved" in expected:
        updates[str(trial.step.steps)] = compare.updates(wrapped, expected, held)
    dist.barrier()
    return Outcome(
        rank=rank,
        gradients=gradients,
        inputs=inputs,
        updates=updates,
        losses=losses,
        reference_losses=expected["losses"] if expected is not None else [],
        gradient_norms=norms,
        reference_norms=expected["norms"] if expected is not None else [],
        replicas=observer.steps,
        steps_done=trial.step.steps,
        step_seconds=seconds,
        notes=wrapped.notes,
        versions=versions(),
    )


class Weights:
    """Watches who holds whose experts while a model is made; ``held`` is the last that was found
    (FQN -> local rows' experts)."""

    def __init__(self, trial: Trial, recorder: Any, expected: Optional[Dict[str, Any]]) -> None:
        self.trial = trial
        self.recorder = recorder
        self.expected = expected
        self.held: Dict[str, List[int]] = {}

    def told(self, when: str, model: nn.Module, anatomy: tiny.Anatomy) -> None:
        if self.expected is None or self.trial.model.source != "checkpoint":
            return
        rows = ownership.examine(model, anatomy, self.expected["weights"], ep_rank(self.trial))
        self.held = {row.fqn: row.held for row in rows[0]}
        if self.recorder is not None:
            self.recorder.event("weights", keep=True, **ownership.event(when, rows, self.trial))
            if when == "prepared":
                ownership.watch_use(anatomy, self._use)

    def _use(self, rows: Dict[str, int]) -> None:
        if self.recorder is not None:
            self.recorder.event("experts_used", keep=True, rows=rows)


def fill_uninitialized() -> None:
    """From here on memory that torch allocates without writing it holds nan (its own switch), so
    that whoever reads it shows every time and not by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def tell_optimizer(wrapped: Wrapped, recorder: Any) -> None:
    """Parameter groups that one call cannot take, before the step that raises because of them."""
    if recorder is None:
        return
    for found in optimizers.findings(wrapped.optimizer):
        recorder.finding(optimizers.FINDING, found.text, **dataclasses.asdict(found))


def forward_backward(wrapped: Wrapped, rank: int, number: int, device: torch.device) -> float:
    """All micro-batches of one step; returns this rank's mean loss."""
    trial = wrapped.trial
    total = 0.0
    for micro in range(trial.step.accumulate):
        tokens = data.batch(trial, rank, number, micro).to(device)
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
