"""Times each fix on the healthy mid-size step, all fixes together in one process group.

One model per fix is built and sharded. Each round then runs one step of each, so that other load on
the machine affects all alike. The ratio of two fixes is computed round by round.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Dict, List

from moediag.lab.step import preparation, training
from moediag.lab.step.collector import Collector
from moediag.lab.step.shard.wrapped import Wrapped, synchronize
from moediag.protocol import CostTask, SkewSpec
from moediag.recorder.not_applicable import NotApplicable


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
    # The unfixed step twice: the difference between the two is the machine's noise.
    candidates["again"] = candidates[""]
    seconds: Dict[str, List[float]] = {fix: [] for fix in candidates}
    # Round 0 warms caches and lazy imports and is not counted.
    for number in range(task.rounds + 1):
        # A different fix goes first in each round, so that none always follows the same other.
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
