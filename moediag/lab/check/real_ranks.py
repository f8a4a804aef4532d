"""A few real ranks with a tiny model: what the release raises there does not come from the
simulation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.axes import Layout
from moediag.lab.check import sharding, simulated_step
from moediag.lab.check.configured import Configured, anatomy
from moediag.lab.check.simulated_group import ChildRaised, Raised, in_child, in_children, raised
from moediag.lab.step.models import checkpoint
from moediag.lab.step.shard.expert_parallel import Transformers
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import StepTask, Trial
from moediag.recorder.not_applicable import NotApplicable

MOST = 4  # ranks
_WAIT = timedelta(seconds=60)  # for a rank that never comes to a call
# What gloo or a CPU lacks says nothing about the GPUs that are asked about.
_OF_GLOO = re.compile(r"gloo|\bCPU\b|timed? ?out|connection (closed|reset)", re.IGNORECASE)
_When = Optional[Tuple[float, Raised]]


def first_raised(
    configured: Configured, trial: Trial, folder: Path, step: bool = False
) -> Tuple[int, Optional[Raised]]:
    """Returns the number of ranks and what the first of them raised, None if all went well, when a
    tiny model of the same class is loaded and sharded with two gloo ranks along each axis, and with
    ``step`` also has a forward and a backward. Raises NotApplicable if that cannot be tried."""
    small = simulated_step.reduced(trial)
    small = dataclasses.replace(small, task=StepTask(), backend="gloo")
    if small.world_size > MOST:
        raise NotApplicable(f"{small.world_size} ranks would be needed, more than {MOST}")
    sketch = simulated_step.tiny(configured, folder)
    saved, meeting = folder / "real-model", folder / f"real-{'step' if step else 'load'}"

    def save() -> None:
        torch.manual_seed(0)
        model: Any = sketch.build(True).float()
        checkpoint.save(model, saved)

    if not saved.is_dir():
        try:
            in_child(save, folder)
        except ChildRaised as error:
            raise NotApplicable(f"a tiny model cannot be saved: {error.args[0].words}") from error

    def rank(number: int) -> _When:
        torch.set_num_threads(1)
        world = str(small.world_size)
        os.environ.update(RANK=str(number), WORLD_SIZE=world, LOCAL_RANK=str(number))
        store = dist.FileStore(str(meeting), small.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=number, world_size=small.world_size, timeout=_WAIT
        )
        try:
            wrapped = _loaded(sketch, small, saved)
            if step:
                wrapped.backward(wrapped.loss(simulated_step.batch(1)))
        except Exception as error:
            return time.monotonic(), raised(error)
        with contextlib.suppress(RuntimeError):  # another rank ended by its exception
            dist.barrier()  # its peers may still read what it sent
        return None

    works = [functools.partial(rank, number) for number in range(small.world_size)]
    ended: List[Any] = in_children(works, folder)
    if any(isinstance(one, Raised) for one in ended):
        raise NotApplicable("the real ranks did not meet")
    failed = [one for one in ended if one is not None]
    first = min(failed, key=lambda one: one[0])[1] if failed else None
    if first is not None and _OF_GLOO.search(first.text):
        raise NotApplicable(f"{small.world_size} ranks on gloo ended with {first.words}")
    return small.world_size, first


def _loaded(sketch: Configured, trial: Trial, saved: Path) -> Wrapped:
    if trial.wrapper.kind != sharding.NATIVE:
        return sharding.wrapped(sketch, sketch.build(True).float(), trial)
    asked = sharding.arguments(Layout(trial.layout), trial.world_size)
    model: Any = sketch.model.from_pretrained(
        str(saved), distributed_config=checkpoint.distributed_config(asked)
    )
    return Transformers(model.train(), anatomy(model, sketch.experts), trial)
