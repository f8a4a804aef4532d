"""The step under test in one process, in fp32: what right means.

Every rank's batches run one after the other with that rank's routing skew, each loss divided by the
number of ranks and micro-batches, then clip and optimizer as in the trial.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import torch
from torch import nn

from moediag.protocol import Trial
from moediag.worker import data, models
from moediag.worker.models import NotApplicable
from moediag.worker.skew import RouterSkew
from moediag.worker.wrap import Wrapped


def run(trial: Trial) -> None:
    """Writes ``trial.reference_path``: {"gradients": [per step {FQN: tensor or None}],
    "losses": [per step, mean over ranks], "norms": [before clipping]}.

    Raises NotApplicable, also for a model that no reference can decide: one that draws random
    numbers while it trains, or whose router cannot be bent as asked.
    """
    model = models.build(trial.model, trial.step.seed, dtype="float32")
    anatomy = models.anatomy(model, trial.model)
    wrapped = Wrapped(model, anatomy, trial)
    wrapped.make_optimizer()
    skew = RouterSkew(trial.skew, anatomy.experts)
    share = trial.world_size * trial.step.accumulate
    gradients: List[Dict[str, Any]] = []
    losses: List[float] = []
    norms: List[float] = []
    with skew.installed(anatomy):
        for number in range(1, trial.step.steps + 1):
            skew.set_step(number)
            total = 0.0
            for micro in range(trial.step.accumulate):
                for rank in range(trial.world_size):
                    skew.set_rank(rank)
                    tokens = data.batch(trial.model, trial.step, trial.skew, rank, number, micro)
                    loss = _forward(wrapped, tokens)
                    (loss / share).backward()
                    total += float(loss.detach()) / share
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
    target = Path(str(trial.reference_path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    torch.save({"gradients": gradients, "losses": losses, "norms": norms}, temporary)
    temporary.replace(target)


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
