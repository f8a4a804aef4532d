"""What each fix costs: the healthy mid-size step, all fixes side by side in one process group.

One model per fix is built and sharded; rounds then run one step of each in turn, so that whatever
else the machine does falls on all of them alike. The ratio of two fixes is taken round by round.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Dict, List

from moediag.protocol import CostTask, SkewSpec
from moediag.worker import preparation, training
from moediag.worker.collector import Collector
from moediag.worker.not_applicable import NotApplicable
from moediag.worker.shard.wrapped import Wrapped, synchronize


def run(collector: Collector) -> None:
    """Fills ``Outcome.cost``: fix name ("" unfixed, "again" the same) -> seconds of each round."""
    trial, task, device = collector.trial, collector.trial.task, collector.device
    assert isinstance(task, CostTask)
    healthy = dataclasses.replace(
        trial,
        model=task.model,
        # Deep random models route unevenly: equal batches keep the unfixed step healthy too.
        skew=SkewSpec(batches="identical"),
        step=dataclasses.replace(trial.step, batch=task.batch, seq_len=task.seq_len, accumulate=1),
        reference_path=None,
    )
    candidates: Dict[str, Wrapped] = {}
    for fix in ["", *task.fixes]:
        try:
            fixed = dataclasses.replace(healthy, fix=fix or None)
            candidates[fix] = preparation.prepare(fixed, device)
        except NotApplicable as reason:
            collector.note(f"cost of {fix}: {reason}")
    # The unfixed step twice: what differs between the two is the machine's noise, not a cost.
    candidates["again"] = candidates[""]
    seconds: Dict[str, List[float]] = {fix: [] for fix in candidates}
    # Round 0 warms caches and lazy imports and is not counted.
    for number in range(task.rounds + 1):
        # Another one goes first in each round: nobody always follows the same neighbour.
        order = list(candidates)
        order = order[number % len(order) :] + order[: number % len(order)]
        for fix in order:
            synchronize()
            began = time.perf_counter()
            training.forward_backward(candidates[fix], collector.rank, number + 1, device)
            training.finish(candidates[fix])
            synchronize()
            if number:
                seconds[fix].append(time.perf_counter() - began)
    collector.set(cost=seconds, steps_done=task.rounds)
