"""The step under test in one process, in fp32; the definition of a correct result.

Every rank's batches run one after the other with that rank's routing skew, each loss divided by the
number of ranks and micro-batches, then clip and optimizer as in the trial.

If the trial computes in another type than its parameters', the same training runs again with copies
of the parameters in that type, by the same eager loop. Its distance from fp32 is the effect of
rounding alone, and the scale for a kernel's allowed error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import nn

from moediag.lab.step import data
from moediag.lab.step.measure.block_inputs import InputGradients
from moediag.lab.step.models import tiny
from moediag.lab.step.models.checkpoint import save
from moediag.lab.step.models.pretrain import pretrain
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard import optimizers
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable


def run(trial: Trial) -> None:
    """Writes the result of :func:`compute` to ``trial.reference_path``. Raises what it raises."""
    found = compute(trial)
    target = Path(str(trial.reference_path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    torch.save(found, temporary)
    temporary.replace(target)


def compute(trial: Trial, moved: bool = False) -> Dict[str, Any]:
    """Returns {"gradients": [per step {FQN: tensor or None}], "inputs": [per step [per rank {MoE
    block: gradient of its input, (micro-batches, batch, seq_len, hidden)}]], "losses": [per step,
    mean over ranks], "norms": [before clipping], "weights": {FQN: tensor as saved, with
    buffers of a model built by rules}}. With ``moved``
    also "moved": {FQN: tensor after the last step}. For a mixed-precision trial also "rounding":
    [per step {FQN: largest absolute difference of the gradient computed in the trial's type}].
    Saves the checkpoint first if ranks load one.

    Raises NotApplicable, also for a model without a valid reference: one that draws random numbers
    in training, or whose router cannot be skewed as requested.
    """
    # A plain loop over the experts, whatever implementation the trial uses.
    model = tiny.build(trial.model, trial.step.seed, dtype="float32", experts="eager")
    if trial.model.source == "checkpoint":
        stored = tiny.build(trial.model, trial.step.seed)
        if trial.model.pretrain:
            pretrain(model, trial)
            stored.load_state_dict(model.state_dict())
            model.load_state_dict(stored.state_dict())  # rounded as in the trial
        save(stored, trial.checkpoint_path)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    # In a hunt alone: elsewhere a cast of this model may have rounded what stays in fp32 there.
    if trial.model.by_rules and trial.model.dtype == "float32":
        weights.update({name: b.detach().clone() for name, b in model.named_buffers()})
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
    """Runs all steps. ``computes_in``: forward and backward run on copies of the parameters."""
    working = model if computes_in is None else copy.deepcopy(model)
    anatomy = tiny.anatomy(working, trial.model)
    wrapped = Wrapped(working, anatomy, trial)
    # One plain model: the trial's handling of shards in optimizer and clipping is irrelevant.
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
    """Runs step ``number`` of every rank; returns the mean loss and inputs' gradients by rank."""
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
    """Sets the parameters of ``working`` to those of ``model`` in ``dtype``, without gradients;
    buffers stay as they are, as with FSDP2."""
    for own, copied in zip(model.parameters(), working.parameters()):  # noqa: B905 - Python 3.9
        copied.data = own.detach().to(dtype)
        copied.grad = None


def _bring_back(working: nn.Module, model: nn.Module) -> None:
    for own, copied in zip(model.parameters(), working.parameters()):  # noqa: B905 - Python 3.9
        own.grad = None if copied.grad is None else copied.grad.to(own.dtype)


def _apart(one: Optional[torch.Tensor], other: Optional[torch.Tensor]) -> float:
    """Returns the largest absolute difference; a missing gradient is zero."""
    if one is None or other is None:
        alone = other if one is None else one
        return 0.0 if alone is None else float(alone.abs().max())
    return float((one - other).abs().max())


def _forward(wrapped: Wrapped, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the loss. Raises NotApplicable if the forward drew random numbers: ranks and
    reference would draw different ones, and healthy gradients would be reported as wrong."""
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
    """Returns what :func:`run` wrote."""
    return torch.load(path, map_location="cpu", weights_only=True)


class Right:
    """Trains the trial's model in fp32 on the CPU without sharding, on every rank's batch in turn.

    ``forward``: a context around each forward and backward, for effects outside the model.
    ``before(rank, step)`` is called before each. ``losses`` (mean over ranks) and ``norms`` (before
    clipping) grow with each step; ``model`` holds the weights.
    """

    def __init__(
        self,
        trial: Trial,
        forward: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
        before: Optional[Callable[[int, int], None]] = None,
    ) -> None:
        self._trial = trial
        self._forward = forward
        self._before = before
        self.model: nn.Module = tiny.build(
            trial.model, trial.step.seed, dtype="float32", experts="eager"
        )
        self._wrapped = Wrapped(self.model, tiny.anatomy(self.model, trial.model), trial)
        self._wrapped.optimizer = optimizers.build(self.model.parameters(), trial.step)
        self.losses: List[float] = []
        self.norms: List[float] = []

    def step(self, number: int) -> Dict[str, Optional[torch.Tensor]]:
        """Returns the next step's gradients, ``number`` from 1; None: no batch reached it."""
        trial, total = self._trial, 0.0
        with self._forward():
            for rank in range(trial.world_size):
                if self._before is not None:
                    self._before(rank, number)
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
