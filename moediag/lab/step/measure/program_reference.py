"""The reference of a program that trains a whole model: the same steps in one process.

Every rank computes it itself (the models are tiny); nothing is written or shared.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, List, Optional

import torch
from torch import nn

from moediag.lab.step import data
from moediag.lab.step.models import tiny
from moediag.lab.step.shard import optimizers
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial


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
