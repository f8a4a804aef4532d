"""What loading costs: every method and size of model in turn, side by side in one process group.

Each load starts from the same model on the meta device and from weights that no load before had,
and each is checked bit by bit: a fast load of wrong bytes is no load.
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
import torch.distributed as dist

from moediag.protocol import LoadCostSpec, LoadTiming, Outcome, Trial
from moediag.recorder.calls import METHODS as COLLECTIVES
from moediag.recorder.patches import Patches
from moediag.worker.not_applicable import NotApplicable
from moediag.worker.shard import fsdp2_internals
from moediag.worker.shard.wrapped import mesh_of, synchronize
from moediag.worker.tasks import load_methods, load_model
from moediag.worker.tasks.load_methods import Job, Missing
from moediag.worker.versions import versions

STAND_IN = (
    "accelerate: its fsdp2_load_full_state_dict was called with a stand-in for the Accelerator, of "
    "which it reads is_main_process; Accelerator itself never enters FSDP on the CPU"
)
UNRECORDED = "no recorder was installed: its time per call would count against who calls most"
_WRONG_KEPT = 20  # names of wrong parameters; their number says nothing beyond


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """``Outcome.loads``, one entry per method and size. Raises ValueError when the trial has no
    ``load_cost`` section or names an unknown method, NotApplicable on all ranks alike."""
    if trial.load_cost is None:
        raise ValueError("a load-cost trial needs a load_cost section")
    notes = fsdp2_internals.prepare_cpu() if device.type == "cpu" else []
    return _Bench(trial, trial.load_cost, rank, device, notes).run()


class _Bench:
    def __init__(
        self, trial: Trial, spec: LoadCostSpec, rank: int, device: torch.device, notes: List[str]
    ) -> None:
        self.spec, self.rank, self.device, self.notes = spec, rank, device, notes
        self.mesh = mesh_of(trial)
        if self.mesh.ndim != 1:
            raise NotApplicable("loading is timed on a mesh of one axis")
        self.weights = load_model.Weights(spec, device)
        self.models = {n: load_model.sharded(n, spec, self.mesh) for n in spec.parameters}
        # Meta tensors, which cost no memory: what every load starts from.
        self.blank = {n: dict(model.state_dict()) for n, model in self.models.items()}
        self.timings: Dict[Tuple[str, int], LoadTiming] = {}
        self.methods: List[str] = []

    def run(self) -> Outcome:
        for name in self.spec.methods:
            self._warm(name)
        if not self.methods:
            raise NotApplicable("; ".join(self.notes))
        for number in range(self.spec.rounds):
            # Another one goes first in each round: nobody always follows the same neighbour.
            at = number % len(self.methods)
            for parameters in self.spec.parameters:
                for name in self.methods[at:] + self.methods[:at]:
                    self._round(name, parameters)
        return Outcome(
            rank=self.rank,
            loads=list(self.timings.values()),
            steps_done=self.spec.rounds,
            notes=[*self.notes, UNRECORDED],
            versions=versions(),
        )

    def _warm(self, name: str) -> None:
        """Each size once, not timed: lazy imports, caches, what the stack lacks, how many
        collectives there are."""
        if name not in load_methods.METHODS:
            raise ValueError(f"load_cost.methods: there is no {name!r}")
        for parameters in self.spec.parameters:
            try:
                with counted() as calls:
                    self._load(name, parameters)
            except Missing as reason:
                self.notes.append(f"{name} is left out: this stack has {reason}")
                return
            size = sum(t.numel() * t.element_size() for t in self.blank[parameters].values())
            self.timings[name, parameters] = LoadTiming(name, parameters, size, dict(calls))
            self._check(name, parameters)
        self.methods.append(name)
        if name == "accelerate":
            self.notes.append(STAND_IN)

    def _round(self, name: str, parameters: int) -> None:
        timing = self.timings[name, parameters]
        timing.seconds.append(self._load(name, parameters))
        self._check(name, parameters)
        communicate = load_methods.METHODS[name][1]
        if communicate is not None:
            timing.communication.append(_timed(communicate(self._job(parameters))))

    def _load(self, name: str, parameters: int) -> float:
        """Seconds of one whole load, of new weights into a blank model."""
        self.weights.renew()
        job = self._job(parameters)
        return _timed(lambda: load_methods.METHODS[name][0](job))

    def _check(self, name: str, parameters: int) -> None:
        """Notes what was not loaded right, and makes the model blank again."""
        known, model = self.timings[name, parameters].wrong, self.models[parameters]
        for wrong in load_model.wrong(model, self.weights, self.rank, self.mesh.size()):
            if wrong not in known and len(known) < _WRONG_KEPT:
                known.append(wrong)
        model.load_state_dict(self.blank[parameters], assign=True)

    def _job(self, parameters: int) -> Job:
        limit = int(self.spec.bucket_mb * 1e6)
        model = self.models[parameters]
        return Job(model, self.weights.full, self.mesh, self.device, limit)


def _timed(work: Callable[[], None]) -> float:
    """Seconds until the last rank is done."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


@contextlib.contextmanager
def counted() -> Iterator[Dict[str, int]]:
    """Collectives by kind that this process issues meanwhile, barriers aside."""
    calls: Dict[str, int] = collections.Counter()
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
