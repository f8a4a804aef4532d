"""Which class shards the model under test: the scenario's ``wrapper.kind`` and layout decide."""

from __future__ import annotations

from typing import Dict, Type

from moediag.protocol import Trial
from moediag.worker.shard import expert_parallel
from moediag.worker.shard.data_parallel import DDP, FSDP1, FSDP2, DeepSpeedZero
from moediag.worker.shard.wrapped import Wrapped

_WITHOUT_EXPERT_PARALLELISM: Dict[str, Type[Wrapped]] = {
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "ddp": DDP,
    "zero2": DeepSpeedZero,
    "zero3": DeepSpeedZero,
    "none": Wrapped,
}


def kind_of(trial: Trial) -> Type[Wrapped]:
    """The class that shards the trial's model. Raises NotApplicable."""
    kind = trial.wrapper.kind
    if trial.layout.get("ep", 1) > 1 or kind not in _WITHOUT_EXPERT_PARALLELISM:
        return expert_parallel.kind(trial)
    return _WITHOUT_EXPERT_PARALLELISM[kind]
