"""Predicts in one process whether ranks would disagree about which parameters have a gradient.

Every rank's batches run alone, with that rank's routing skew. If different ranks have different
parameters without a gradient, a wrapper that reduces existing gradients (FSDP2, ZeRO-2) reduces
different things on different ranks. No process group, no sharding, no optimizer: a prediction, at a
tenth of the cost of a run.
"""

from __future__ import annotations

import math
from typing import List

from moediag.lab.step import data
from moediag.lab.step.models import checkpoint, tiny
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Susceptibility, Trial
from moediag.recorder.not_applicable import NotApplicable


def run(trial: Trial) -> Susceptibility:
    """Returns the prediction for the trial's steps, each from the same weights, without training.
    Not applicable for a release that cannot build the model, or whose router cannot be skewed."""
    try:
        return _run(trial)
    except NotApplicable as reason:
        return Susceptibility(applicable=str(reason))


def _run(trial: Trial) -> Susceptibility:
    asked = checkpoint.known(trial.model.experts_implementation)
    model = tiny.build(trial.model, trial.step.seed, experts=asked)
    anatomy = tiny.anatomy(model, trial.model)
    wrapped = Wrapped(model, anatomy, trial)
    skew = RouterSkew(trial.skew, anatomy.experts)
    missing: List[List[List[str]]] = []
    finite = True
    with skew.installed(anatomy):
        for number in range(1, trial.step.steps + 1):
            skew.set_step(number)
            by_rank: List[List[str]] = []
            for rank in range(trial.world_size):
                skew.set_rank(rank)
                model.zero_grad(set_to_none=True)
                for micro in range(trial.step.accumulate):
                    loss = wrapped.loss(data.batch(trial, rank, number, micro))
                    loss.backward()
                    finite = finite and math.isfinite(float(loss.detach()))
                by_rank.append([n for n, p in model.named_parameters() if p.grad is None])
            missing.append(by_rank)
    if skew.missed:
        raise NotApplicable(
            f"the router of {trial.model.family} does not choose experts by a top-k over all of "
            "them, so none can be made to starve"
        )
    return Susceptibility(missing, finite)
