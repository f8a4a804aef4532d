"""What each fix costs: the healthy mid-size step, all fixes side by side in one process group.

One model per fix is built and sharded; rounds then run one step of each in turn, so that whatever
else the machine does falls on all of them alike. The ratio of two fixes is taken round by round.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Dict, List

import torch

from moediag.protocol import Outcome, SkewSpec, Trial
from moediag.worker.models.tiny import NotApplicable
from moediag.worker.shard.wrapped import Wrapped, synchronize
from moediag.worker.tasks import step
from moediag.worker.versions import versions


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """``Outcome.cost``: by fix name ("" unfixed, "again" the same) the seconds of each round.
    Raises ValueError when the trial has no ``cost`` section."""
    if trial.cost is None:
        raise ValueError("a cost trial needs a cost section")
    healthy = dataclasses.replace(
        trial,
        model=trial.cost.model,
        # Deep random models route unevenly: equal batches keep the unfixed step healthy too.
        skew=SkewSpec(batches="identical"),
        step=dataclasses.replace(
            trial.step, batch=trial.cost.batch, seq_len=trial.cost.seq_len, accumulate=1
        ),
        reference_path=None,
    )
    candidates: Dict[str, Wrapped] = {}
    notes: List[str] = []
    for fix in ["", *trial.cost.fixes]:
        try:
            candidates[fix] = step.prepare(dataclasses.replace(healthy, fix=fix or None), device)
        except NotApplicable as reason:
            notes.append(f"cost of {fix}: {reason}")
    # The unfixed step twice: what differs between the two is the machine's noise, not a cost.
    candidates["again"] = candidates[""]
    seconds: Dict[str, List[float]] = {fix: [] for fix in candidates}
    # Round 0 warms caches and lazy imports and is not counted.
    for number in range(trial.cost.rounds + 1):
        # Another one goes first in each round: nobody always follows the same neighbour.
        order = list(candidates)
        order = order[number % len(order) :] + order[: number % len(order)]
        for fix in order:
            synchronize()
            began = time.perf_counter()
            step.forward_backward(candidates[fix], rank, number + 1, device)
            step.finish(candidates[fix])
            synchronize()
            if number:
                seconds[fix].append(time.perf_counter() - began)
    return Outcome(
        rank=rank,
        cost=seconds,
        steps_done=trial.cost.rounds,
        notes=notes,
        versions=versions(),
    )
