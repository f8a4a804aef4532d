"""The measurements of one run: the answers of its ranks, and their tensors step by step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Optional

import torch

from moediag.protocol import Measured, read_measured
from moediag.protocol.measured import start_tensors, step_tensors
from moediag.ranks.verify import slices, tensor_files
from moediag.ranks.verify.tensor_files import Tensors
from moediag.recorder.step.pieces import Where

Wholes = Dict[str, Optional[torch.Tensor]]


@dataclass(frozen=True)
class Run:
    folder: Path
    ranks: Dict[int, Measured]

    @classmethod
    def read(cls, folder: Path) -> Run:
        return cls(folder, read_measured(folder))

    # rank -> parameter -> the part of the whole that it is, where the rank does not know it; None:
    # it may be several parts
    places: Dict[int, Dict[str, Optional[Where]]] = field(default_factory=dict)
    renamed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # see Measured

    def named_as(self, reference: Measured) -> Run:
        """Returns this run with the names of the reference."""
        if not reference.renamed:
            return self
        found = dataclasses.replace(self, renamed=reference.renamed)
        ranks = {}
        for rank, one in self.ranks.items():
            steps = [
                dataclasses.replace(
                    step,
                    rates={found.name(rank, n): rate for n, rate in step.rates.items()},
                    updates={found.name(rank, n): count for n, count in step.updates.items()},
                )
                for step in one.steps
            ]
            ranks[rank] = dataclasses.replace(one, steps=steps)
        return dataclasses.replace(found, ranks=ranks)

    def name(self, rank: int, name: str) -> str:
        """Returns the reference's name of a parameter or module of this rank."""
        return slices.shifted(name, self.renamed.get(str(rank), {}))

    def start(self, rank: int) -> Tensors:
        return self._placed(rank, tensor_files.load(self.folder / start_tensors(rank))["start"])

    def step(self, rank: int, number: int) -> Dict[str, Tensors]:
        """Returns the groups ``gradients`` and ``weights`` of step ``number`` (from 1)."""
        found = tensor_files.load(self.folder / step_tensors(rank, number))
        groups = {"gradients": {}, "weights": {}, **found}
        return {name: self._placed(rank, group) for name, group in groups.items()}

    def _placed(self, rank: int, tensors: Tensors) -> Tensors:
        own = self.places.get(rank, {})
        found: Tensors = {}
        for called, stored in tensors.items():
            name = self.name(rank, called)
            where = own.get(name, stored.where)
            if where is not None:
                found[name] = dataclasses.replace(stored, where=where)
        return found

    @property
    def steps(self) -> int:
        """The number of steps that all ranks have measured."""
        return min((len(one.steps) for one in self.ranks.values()), default=0)

    @property
    def dtypes(self) -> List[str]:
        return sorted({name for one in self.ranks.values() for name in one.dtypes})


@dataclass(frozen=True)
class Alone:
    """Whole tensors of a run of one process: nothing is distributed."""

    start: Wholes
    gradients: List[Wholes] = field(default_factory=list)  # by step
    weights: List[Wholes] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> Alone:
        tied = run.ranks[0].tied
        steps = [run.step(0, n) for n in range(1, run.steps + 1)]
        return cls(
            _wholes(run.start(0), tied),
            [_wholes(step["gradients"], tied) for step in steps],
            [_wholes(step["weights"], tied) for step in steps],
        )


def _wholes(tensors: Tensors, tied: Mapping[str, str]) -> Wholes:
    """The tensors under all their names: a stage of a pipeline may have another one."""
    found = {name: tensor_files.whole([stored])[0] for name, stored in tensors.items()}
    found.update((other, found[name]) for other, name in tied.items() if name in found)
    return found
