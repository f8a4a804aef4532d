"""Times every method and size of model in turn, on one rank.

``torchrun ... -m bench.load_cost.rank FOLDER``; FOLDER holds ``spec.json`` and receives each rank's
``rank-N.json``. Each load starts from the same model on the meta device and from weights that no
earlier load had, and each is compared bit by bit: the time of a load of wrong bytes means nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.load_cost import methods, model
from bench.load_cost.methods import Job, Missing
from bench.load_cost.timing import RankTimings, Spec, Timing
from moediag.lab.step.collector import versions
from moediag.lab.step.shard import fsdp2_internals
from moediag.lab.step.shard.wrapped import synchronize
from moediag.protocol import write_json
from moediag.recorder.calls import METHODS as COLLECTIVES
from moediag.recorder.patches import Patches

STAND_IN = (
    "accelerate: fsdp2_load_full_state_dict was called with a stand-in for the Accelerator, of "
    "which it reads is_main_process; Accelerator itself never enters FSDP on the CPU"
)
CPU = torch.device("cpu")
_WRONG_KEPT = 20  # names of wrong parameters kept per method and size


def run(spec: Spec, device: torch.device) -> RankTimings:
    """One timing per method and size. Raises ValueError for an unknown method."""
    return _Bench(spec, device).run()


class _Bench:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.notes = fsdp2_internals.prepare_cpu() if device.type == "cpu" else []
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
        self.weights = model.Weights(spec, device)
        self.models = {n: model.sharded(n, spec, self.mesh) for n in spec.parameters}
        # Meta tensors, which cost no memory: every load starts from them.
        self.blank = {n: dict(one.state_dict()) for n, one in self.models.items()}
        self.timings: dict[tuple[str, int], Timing] = {}
        self.methods: list[str] = []

    def run(self) -> RankTimings:
        for name in self.spec.methods:
            self._warm(name)
        for number in range(self.spec.rounds):
            # Another method goes first in each round, so that none always follows the same one.
            at = number % max(1, len(self.methods))
            for parameters in self.spec.parameters:
                for name in self.methods[at:] + self.methods[:at]:
                    self._round(name, parameters)
        return RankTimings(list(self.timings.values()), self.notes, versions())

    def _warm(self, name: str) -> None:
        """Loads each size once, untimed: imports, fills caches and counts the collectives."""
        if name not in methods.METHODS:
            raise ValueError(f"there is no method {name!r}")
        for parameters in self.spec.parameters:
            try:
                with counted() as calls:
                    self._load(name, parameters)
            except Missing as reason:
                self.notes.append(f"{name} is left out: this stack has {reason}")
                return
            size = sum(t.numel() * t.element_size() for t in self.blank[parameters].values())
            self.timings[name, parameters] = Timing(name, parameters, size, dict(calls))
            self._check(name, parameters)
        self.methods.append(name)
        if name == "accelerate":
            self.notes.append(STAND_IN)

    def _round(self, name: str, parameters: int) -> None:
        timing = self.timings[name, parameters]
        timing.seconds.append(self._load(name, parameters))
        self._check(name, parameters)
        communicate = methods.METHODS[name][1]
        if communicate is not None:
            timing.communication.append(_timed(communicate(self._job(parameters))))

    def _load(self, name: str, parameters: int) -> float:
        """Seconds of one whole load of new weights into a blank model."""
        self.weights.renew()
        job = self._job(parameters)
        return _timed(lambda: methods.METHODS[name][0](job))

    def _check(self, name: str, parameters: int) -> None:
        """Adds the parameters with wrong bytes to the timing, and makes the model blank again."""
        known, loaded = self.timings[name, parameters].wrong, self.models[parameters]
        for wrong in model.wrong(loaded, self.weights, self.rank, self.mesh.size()):
            if wrong not in known and len(known) < _WRONG_KEPT:
                known.append(wrong)
        loaded.load_state_dict(self.blank[parameters], assign=True)

    def _job(self, parameters: int) -> Job:
        limit = int(self.spec.bucket_mb * 1e6)
        return Job(self.models[parameters], self.weights.full, self.mesh, self.device, limit)


def _timed(work: Callable[[], None]) -> float:
    """Seconds of ``work`` until the last rank is done."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Number of collectives of each kind that this process issues meanwhile, without barriers."""
    calls: dict[str, int] = collections.Counter()
    patches = Patches()

    def counting(op: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls[op] += 1
                return original(self, *args, **kwargs)

            return method

        return make

    for name, shape in COLLECTIVES.items():
        if shape.op != "barrier":
            patches.replace(dist.ProcessGroup, name, counting(shape.op))
    try:
        yield calls
    finally:
        patches.restore()


def main() -> None:
    folder = Path(sys.argv[1])
    spec = Spec(**json.loads((folder / "spec.json").read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    found = run(spec, torch.device("cuda", torch.cuda.current_device()) if gpu else CPU)
    write_json(folder / f"rank-{dist.get_rank()}.json", dataclasses.asdict(found))
    dist.barrier()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Everything is measured and written. In 2 of about 150 runs a rank failed without an exception,
    # so not in Python; what remains of torch is left to the operating system.
    os._exit(0)


if __name__ == "__main__":
    main()
