"""Writes measurements as the ranks of a job would, without ranks: a small model, its gradients cut
into each rank's parts, and an optimizer that moves each weight by its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import Measured, MeasuredStep
from moediag.protocol.measured import start_tensors, step_tensors
from moediag.ranks.verify import comparison, tensor_files
from moediag.ranks.verify.runs import Run
from moediag.ranks.verify.tensor_files import Stored, Tensors
from moediag.recorder.step.pieces import BOX, WHOLE, Where
from moediag.result import Diagnosis

SHAPES = {
    "layers.0.attn.weight": (8, 8),
    "layers.0.mlp.gate.weight": (4, 8),
    "layers.0.mlp.experts.w1": (4, 8, 6),
    "head.weight": (10, 8),
}
EXPERTS = "layers.0.mlp.experts.w1"
RATE = 1e-2

# (rank, name, gradient) -> what the rank has instead
Change = Callable[[int, str, torch.Tensor], torch.Tensor | None]


def same(rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor


def gradients(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@dataclass
class Job:
    """A job of ``world`` ranks; with ``sharded``, experts lie in rows on ep."""

    folder: Path
    world: int = 2
    sharded: bool = False
    steps: int = 1
    change: Change = same  # of the gradient as measured
    moves: Change = same  # of the update
    rates: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float | None] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)
    random: bool = False
    across: str = ""
    auxiliary: bool = False
    micro_batches: int = 1
    without: tuple[int, ...] = ()  # ranks that measured nothing
    noise: float = 0.0  # relative, of every gradient
    dtypes: tuple[str, ...] = ("float32",)
    problems: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # parameters that no optimizer has
    foreign: bool = False
    updates: float | None = None  # as the optimizer counts them after step 1
    averages: tuple[int, ...] = ()  # ranks
    tied: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # what a rank calls a parameter

    def write(self) -> Path:
        self.folder.mkdir(parents=True)
        for rank in range(self.world):
            if rank not in self.without:
                self._rank(rank)
        return self.folder

    def _rank(self, rank: int) -> None:
        start = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        parts = {name: self._part(rank, name, tensor) for name, tensor in start.items()}
        parts = {
            self.renamed.get(n, n): replace(p, trainable=n not in self.frozen)
            for n, p in parts.items()
        }
        tensor_files.save(self.folder / start_tensors(rank), {"start": parts})
        rate = self.rates.get(rank, RATE)
        moved = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for number in range(1, self.steps + 1):
            groups: dict[str, Tensors] = {"gradients": {}, "weights": {}}
            for name, gradient in gradients(number).items():
                if name in (*self.frozen, *self.left_out):
                    continue
                noisy = gradient * (1 + self.noise * torch.rand_like(gradient).sign())
                found = self.change(rank, name, noisy)
                called = self.renamed.get(name, name)
                groups["gradients"][called] = self._part(rank, name, found, gradient)
                update = self.moves(rank, name, -rate * noisy)
                assert update is not None
                moved[name] = moved[name] + update
                groups["weights"][called] = self._part(rank, name, moved[name])
            tensor_files.save(self.folder / step_tensors(rank, number), groups)
        alone = self.world == 1
        own = [f"s{i}" for i in range(4)] if alone else [f"s{2 * rank}", f"s{2 * rank + 1}"]
        if self.sharded and not alone:
            own = [f"s{i}" for i in range(4)]
        stepped = [self.renamed.get(n, n) for n in SHAPES if n not in self.left_out]
        step = MeasuredStep(
            samples=self.samples.get(rank, own),
            losses=[1.0] * self.micro_batches,
            norm=self.norms.get(rank),
            rates=dict.fromkeys(stepped, rate),
            updates={} if self.updates is None else dict.fromkeys(stepped, self.updates),
        )
        Measured(
            rank, self.world, 1, "python", done=True, steps=[step] * self.steps,
            dtypes=list(self.dtypes), random=self.random, across_samples=self.across,
            problems=list(self.problems), auxiliary=self.auxiliary, foreign=self.foreign,
            averages_over=list(self.averages), tied=self.tied,
        ).write(self.folder)  # fmt: skip

    def _part(
        self, rank: int, name: str, tensor: torch.Tensor | None, shape: torch.Tensor | None = None
    ) -> Stored:
        whole = tuple((tensor if tensor is not None else shape).shape)  # type: ignore[union-attr]
        if not self.sharded or name != EXPERTS or self.world == 1:
            return Stored(Where(WHOLE, whole), tensor)
        rows = whole[0] // self.world
        where = Where(BOX, whole, (rank * rows, 0, 0))
        part = None if tensor is None else tensor[rank * rows : (rank + 1) * rows]
        return Stored(where, part, f"Shard(0) on ep[{self.world}]")


def reference(folder: Path, steps: int = 1, noise: float = 1e-7, **options: object) -> list[Path]:
    """Writes the three runs of one process."""
    runs = []
    for name, own in (("first", 0.0), ("again", 0.0), ("rounded", noise)):
        given = {"world": 1, "steps": steps, "noise": own, **options}
        runs.append(Job(folder / name, **given).write())  # type: ignore[arg-type]
    return runs


def judged(job: Job, references: Sequence[Path], layout: dict[str, int] | None = None) -> Diagnosis:
    """The diagnosis of the outcomes of a comparison."""
    outcomes = comparison.outcomes(Run.read(job.write()), [Run.read(one) for one in references])
    ranks = {
        o.rank: RankEvidence(o.rank, outcome=o, finished=True, not_seen=tuple(o.not_seen))
        for o in outcomes
    }
    return diagnose(Evidence(max(job.world, len(ranks)), ranks, layout=layout or {}))
