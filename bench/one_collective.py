"""Measures the cost of recording one collective: ``python -m bench.one_collective``.

It uses torch's fake process group, whose collectives do nothing, so the difference is the cost of
recording. Recorded and unrecorded rounds alternate, and the fastest round of each counts.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from moediag.recorder.start import install


def microseconds_per_collective(rounds: int = 7, calls: int = 500) -> dict[str, float]:
    """Returns the microseconds added to one call: ``python`` (``dist.all_reduce``) and ``native``
    (a functional collective, issued from C++). No other process group may exist."""
    import torch.distributed._functional_collectives as functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    world, x = dist.group.WORLD, torch.ones(16)

    def python() -> None:
        dist.all_reduce(x)

    def native() -> None:
        functional.wait_tensor(functional.all_reduce(x, "sum", world))

    try:
        return {f.__name__: _added(f, rounds, calls) for f in (python, native)}
    finally:
        dist.destroy_process_group()


def _added(call: Callable[[], None], rounds: int, calls: int) -> float:
    plain: list[float] = []
    recorded: list[float] = []
    for _ in range(rounds):
        plain.append(_seconds(call, calls))
        with tempfile.TemporaryDirectory() as folder:
            recorder = install(folder, 0, 2)
            try:
                recorded.append(_seconds(call, calls))
            finally:
                recorder.uninstall()
    return (min(recorded) - min(plain)) * 1e6


def _seconds(call: Callable[[], None], calls: int) -> float:
    for _ in range(20):
        call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(microseconds_per_collective()))  # noqa: T201
