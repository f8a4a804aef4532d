"""The step under test in one process, in fp32, which defines what is right.

Every rank's batches run one after the other with that rank's routing skew, each loss divided by the
number of ranks and micro-batches, then clip and optimizer as in the trial.

Where the trial computes in another type than its parameters have, the same training runs once more
with copies of the parameters in that type, by the same eager loop: its distance
from fp32 is the effect of rounding alone, and the scale for the error that a kernel may have.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from moediag.protocol import Trial
from moediag.worker import data
from moediag.worker.measure.block_inputs import InputGradients
from moediag.worker.models import tiny
from moediag.worker.models.checkpoint import save
from moediag.worker.models.pretrain import pretrain
from moediag.worker.models.skew import RouterSkew
from moediag.worker.not_applicable import NotApplicable
from moediag.worker.shard import optimizers
from moediag.worker.shard.wrapped import Wrapped


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
    also "moved": {FQN: tensor after the last step}, and for a trial of mixed precision "rounding":
    [per step {FQN: largest absolute difference of the gradient when it is computed in the trial's
    type}]. Where ranks load a checkpoint, it is saved here first.

    Raises NotApplicable, also for a model that no reference can decide: one that draws random
    numbers while it trains, or whose router cannot be bent as asked.
    """
    # One expert after the other in a plain loop, whatever the trial computes them with.
    model = tiny.build(trial.model, trial.step.seed, dtype="float32", experts="eager")
    if trial.model.source == "checkpoint":
        stored = tiny.build(trial.model, trial.step.seed)
        if trial.model.pretrain:
            pretrain(model, trial)
            stored.load_state_dict(model.state_dict())
            model.load_state_dict(stored.state_dict())  # rounded as the trial
        save(stored, trial.checkpoint_path)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    mixed = trial.computes_in not in (trial.model.dtype, "float32")
    again = copy.deepcopy(model) if mixed else None
    found = _train(model, trial)
    found["weights"] = weights
    if moved:
        found["moved"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    if again is not None:
        rounded = _train(again, trial, getattr(torch, trial.computes_in))["gradients"]
        found["rounding"] = [
            {n: _apart(g, other[n]) for n, g in true.items()}
            for true, other in zip(found["gradients"], rounded)  # noqa: B905 - Python 3.9
        ]
    return found


def _train(
    model: nn.Module, trial: Trial, computes_in: Optional[torch.dtype] = None
) -> Dict[str, Any]:
    """All steps. ``computes_in``: forward and backward run on copies of the parameters."""
    working = model if computes_in is None else copy.deepcopy(model)
    anatomy = tiny.anatomy(working, trial.model)
    wrapped = Wrapped(working, anatomy, trial)
    # One plain model: how the trial's optimizer and clipping deal with shards does not matter.
    wrapped.optimizer = optimizers.build(
        model.parameters(),
        dataclasses.replace(trial.step, foreach=None, fused=None, parameter_groups="one"),
    )
    skew = RouterSkew(trial.skew, anatomy.experts)
    found: Dict[str, Any] = {"gradients": [], "inputs": [], "losses": [], "norms": []}
    with skew.installed(anatomy), InputGradients(anatomy) as kept:
        for number in range(1, trial.step.steps + 1):
            skew.set_step(number)
            if computes_in is not None:
                _copy(model, working, computes_in)
            loss, inputs = _backward(wrapped, number, skew, kept)
            if computes_in is not None:
                _bring_back(working, model)
            found["losses"].append(loss)
            found["inputs"].append(inputs)
            found["gradients"].append(
                {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
            limit = float("inf") if trial.step.clip is None else trial.step.clip
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
            found["norms"].append(float(norm))
            wrapped.step()
    if skew.missed:
        raise NotApplicable(
            f"the router of {trial.model.family} does not choose experts by a top-k over all of "
            "them, so none can be made to starve"
        )
    return found


def _backward(
    wrapped: Wrapped, number: int, skew: RouterSkew, kept: InputGradients
) -> Tuple[float, List[Dict[str, torch.Tensor]]]:
    """Step ``number`` of every rank in turn: the mean loss, and the inputs' gradients by rank."""
    trial, total = wrapped.trial, 0.0
    share = trial.world_size * trial.step.accumulate
    by_rank: List[Dict[str, torch.Tensor]] = []
    for rank in range(trial.world_size):
        skew.set_rank(rank)
        for micro in range(trial.step.accumulate):
            tokens = data.batch(trial, rank, number, micro)
            loss = _forward(wrapped, tokens)
            (loss / share).backward()
            total += float(loss.detach()) / share
        by_rank.append(kept.take())
    return total, by_rank


def _copy(model: nn.Module, working: nn.Module, dtype: torch.dtype) -> None:
    """The parameters of ``working`` are those of ``model`` in ``dtype``, without gradients;
    buffers stay as they are, as with FSDP2."""
    for own, copied in zip(model.parameters(), working.parameters()):  # noqa: B905 - Python 3.9
        copied.data = own.detach().to(dtype)
        copied.grad = None


def _bring_back(working: nn.Module, model: nn.Module) -> None:
    for own, copied in zip(model.parameters(), working.parameters()):  # noqa: B905 - Python 3.9
        own.grad = None if copied.grad is None else copied.grad.to(own.dtype)


def _apart(one: Optional[torch.Tensor], other: Optional[torch.Tensor]) -> float:
    """Largest absolute difference; a gradient that never came is zero."""
    if one is None or other is None:
        alone = other if one is None else one
        return 0.0 if alone is None else float(alone.abs().max())
    return float((one - other).abs().max())


def _forward(wrapped: Wrapped, tokens: torch.Tensor) -> torch.Tensor:
    """The loss. Raises NotApplicable when the forward drew random numbers: ranks and reference
    would draw different ones, and healthy gradients would be called wrong."""
    before = torch.get_rng_state()
    loss = wrapped.loss(tokens)
    if not torch.equal(before, torch.get_rng_state()):
        family = wrapped.trial.model.family
        raise NotApplicable(
            f"{family} draws random numbers while it trains (dropout, router jitter or sampled "
            "routing), so its gradients cannot be compared with a reference; where its "
            "configuration has a switch for that, set it under model.config"
        )
    return loss


def load(path: str) -> Dict[str, Any]:
    """What :func:`run` wrote."""
    return torch.load(path, map_location="cpu", weights_only=True)
