"""The step under test in one process, in fp32: what right means.

Every rank's batches run one after the other with that rank's routing skew, each loss divided by the
number of ranks and micro-batches, then clip and optimizer as in the trial.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List

import torch
from torch import nn

from moediag.protocol import Trial
from moediag.worker import data, models, optimizers
from moediag.worker.inputs import InputGradients
from moediag.worker.load import save
from moediag.worker.models import NotApplicable
from moediag.worker.pretrain import pretrain
from moediag.worker.skew import RouterSkew
from moediag.worker.wrap import Wrapped


def run(trial: Trial) -> None:
    """Writes what :func:`compute` gives to ``trial.reference_path``. Raises what it raises."""
    found = compute(trial)
    target = Path(str(trial.reference_path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    torch.save(found, temporary)
    temporary.replace(target)


def compute(trial: Trial, moved: bool = False) -> Dict[str, Any]:
    """{"gradients": [per step {FQN: tensor or None}], "inputs": [per step [per rank {MoE block:
    gradient of its input, (micro-batches, batch, seq_len, hidden)}]], "losses": [per step, mean
    over ranks], "norms": [before clipping], "weights": {FQN: tensor as saved}}, with ``moved``
    also "moved": {FQN: tensor after the last step}. Where ranks load a checkpoint, it is saved
    here first.

    Raises NotApplicable, also for a model that no reference can decide: one that draws random
    numbers while it trains, or whose router cannot be bent as asked.
    """
    # One expert after the other in a plain loop, whatever the trial computes them with.
    model = models.build(trial.model, trial.step.seed, dtype="float32", experts="eager")
    anatomy = models.anatomy(model, trial.model)
    if trial.model.source == "checkpoint":
        stored = models.build(trial.model, trial.step.seed)
        if trial.model.pretrain:
            pretrain(model, trial)
            stored.load_state_dict(model.state_dict())
            model.load_state_dict(stored.state_dict())  # rounded as the trial
        save(stored, trial.checkpoint_path)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped = Wrapped(model, anatomy, trial)
    # One plain model: how the trial's optimizer and clipping deal with shards does not matter.
    wrapped.optimizer = optimizers.build(
        model.parameters(),
        dataclasses.replace(trial.step, foreach=None, fused=None, parameter_groups="one"),
    )
    skew = RouterSkew(trial.skew, anatomy.experts)
    share = trial.world_size * trial.step.accumulate
    gradients: List[Dict[str, Any]] = []
    inputs: List[List[Dict[str, torch.Tensor]]] = []
    losses: List[float] = []
    norms: List[float] = []
    with skew.installed(anatomy), InputGradients(anatomy) as kept:
        for number in range(1, trial.step.steps + 1):
            skew.set_step(number)
            total = 0.0
            by_rank: List[Dict[str, torch.Tensor]] = []
            for rank in range(trial.world_size):
                skew.set_rank(rank)
                for micro in range(trial.step.accumulate):
                    tokens = data.batch(trial, rank, number, micro)
                    loss = _forward(wrapped, tokens)
                    (loss / share).backward()
                    total += float(loss.detach()) / share
                by_rank.append(kept.take())
            inputs.append(by_rank)
            gradients.append(
                {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
            limit = float("inf") if trial.step.clip is None else trial.step.clip
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            losses.append(total)
            wrapped.step()
    if skew.missed:
        raise NotApplicable(
            f"the router of {trial.model.family} does not choose experts by a top-k over all of "
            "them, so none can be made to starve"
        )
    found = {
        "gradients": gradients, "inputs": inputs, "losses": losses, "norms": norms,
        "weights": weights,
    }  # fmt: skip
    if moved:
        found["moved"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def _forward(wrapped: Wrapped, tokens: torch.Tensor) -> torch.Tensor:
    """The loss. Raises NotApplicable when the forward drew random numbers: ranks and reference
    would draw different ones, and healthy gradients would be called wrong."""
    before = torch.get_rng_state()
    loss = wrapped.loss(tokens)
    if not torch.equal(before, torch.get_rng_state()):
        family = wrapped.trial.model.family
        raise NotApplicable(
            f"{family} draws random numbers while it trains (dropout, router jitter or sampled "
            "routing), so its gradients cannot be held against a reference; where its "
            "configuration has a switch for that, set it under model.config"
        )
    return loss


def load(path: str) -> Dict[str, Any]:
    """What :func:`run` wrote."""
    return torch.load(path, map_location="cpu", weights_only=True)
