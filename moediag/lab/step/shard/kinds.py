"""Selects the class that shards the model under test, by ``wrapper.kind`` and layout."""

from __future__ import annotations

from typing import Dict, Type

from moediag.axes import CP, ETP, PP, Axis, Layout, supported
from moediag.lab.step.shard import by_hand, expert_parallel
from moediag.lab.step.shard.context_parallel import ContextParallel
from moediag.lab.step.shard.data_parallel import DDP, FSDP1, FSDP2, DeepSpeedZero
from moediag.lab.step.shard.pipeline_parallel import Pipelined
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

_DATA_PARALLEL: Dict[str, Type[Wrapped]] = {
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "ddp": DDP,
    "zero2": DeepSpeedZero,
    "zero3": DeepSpeedZero,
    "none": Wrapped,
}
# Axes that torch's own code divides the step over; FSDP2 shards over the data-parallel ones.
_BESIDE_FSDP2: Dict[Axis, Type[Wrapped]] = {PP: Pipelined, CP: ContextParallel}


def kind_of(trial: Trial) -> Type[Wrapped]:
    """Returns the class that shards the trial's model. Raises NotApplicable."""
    kind, active = trial.wrapper.kind, Layout(trial.layout).active
    refused = [axis for axis in active if not axis.supported]
    if refused and trial.wrapper.distributed_config is None:
        raise NotApplicable(
            f"the step under test cannot run mesh axis {', '.join(refused)}; it runs {supported()}"
        )
    if kind == by_hand.KIND:
        return by_hand.kind(trial)
    if ETP in active and trial.wrapper.distributed_config is None:
        raise NotApplicable(f"wrapper {kind} has no mesh axis {ETP}; kind {by_hand.KIND} has")
    beside = [axis for axis in active if axis in _BESIDE_FSDP2]
    if beside and trial.wrapper.distributed_config is None:
        if kind != "fsdp2" or len(beside) > 1:
            raise NotApplicable(f"wrapper {kind} has no mesh axis {' beside '.join(beside)}")
        return _BESIDE_FSDP2[beside[0]]
    if any(axis.by_loading for axis in active) or kind not in _DATA_PARALLEL:
        return expert_parallel.kind(trial)
    return _DATA_PARALLEL[kind]
