"""Cases of ``bench.jobs``: jobs of 16 to 1,024 ranks with pipeline, data, tensor and expert groups,
as Flight Recorder dumps in files, in each dimension. Our answer is that of `moediag diagnose`.

Seeds below TESTING are for tuning the diagnosis (``bench.labelled`` and the unit tests use only
those); seeds from TESTING on are for counting. LARGE and UNSEEN were not used in tuning.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import jobs
from bench.accuracy import page
from bench.accuracy.counting import Answer, Truth
from bench.accuracy.frtrace import TorchFrTrace
from moediag.pipeline.examine import examine
from moediag.result import FAILURES

TESTING = 2000
Spec = tuple[jobs.Layout, int, int]  # (layout, micro-batches, layers)
LAYOUTS: tuple[Spec, ...] = (
    (jobs.Layout(2, 4, 2, 2), 2, 2),
    (jobs.Layout(4, 2, 2, 2), 3, 2),
    (jobs.Layout(1, 8, 2, 4), 2, 3),
    (jobs.Layout(2, 2, 4, 2), 4, 1),
    (jobs.Layout(1, 16, 1, 4), 2, 2),
    (jobs.Layout(4, 4, 2, 4), 2, 4),
    (jobs.Layout(2, 8, 4, 4), 2, 2),
)
UNSEEN: tuple[Spec, ...] = (
    (jobs.Layout(8, 2, 2, 2), 3, 2),
    (jobs.Layout(1, 4, 4, 4), 3, 2),
    (jobs.Layout(4, 8, 1, 4), 2, 4),
    (jobs.Layout(2, 16, 2, 8), 1, 2),
)
LARGE: tuple[Spec, ...] = (
    (jobs.Layout(4, 16, 4, 8), 2, 2),
    (jobs.Layout(8, 16, 8, 16), 1, 2),
)
OF_LARGE = ("two culprits, apart, active-only", "half absent, active-only")
EVERY_FAULT = tuple(d.name for d in jobs.DIMENSIONS if set(jobs.FAULTS) <= set(d.faults))
STEPS, STEPS_OF_LARGE = 5, 2
SHARP = frozenset(("extra", "op", "size"))  # may be told as a mismatch as well as a hang


@dataclass(frozen=True)
class Case:
    """One case; it has no job if its layout cannot have the fault."""

    dimension: jobs.Dimension
    spec: Spec
    fault: str
    seed: int

    @property
    def name(self) -> str:
        layout = self.spec[0]
        return f"{self.dimension.name}: {self.fault}, {layout.world} ranks, seed {self.seed}"

    @property
    def seen(self) -> bool:
        """Whether rules were tuned on this layout (with other seeds)."""
        return self.spec in LAYOUTS

    def folder(self) -> jobs.Folder | None:
        try:
            job = self.dimension.job(_base(self.spec), self.fault, self.seed)
        except ValueError:
            return None
        return self.dimension.folder(job, self.seed)

    def truth(self, folder: jobs.Folder) -> Truth:
        """Returns what is true of the case: the injected fault. What no evidence can show is not
        demanded."""
        job, absent = folder.job, folder.absent
        if self.fault in jobs.HEALTHY:
            return Truth(self.name, ("clean",))
        verdicts: tuple[str, ...] = ("hang",)
        if self.fault in SHARP:
            verdicts += ("collective-mismatch",)
        elif self.fault == "killed":
            verdicts += ("crash",)
        # Where a rank stands that never comes, no dump tells; where others wait for it, theirs do.
        known = jobs.Run(job).waiting_for(*job.culprits) if job.stuck else job.lines
        lines = tuple(f"train.py:{line}" for line in known)
        hidden = len(absent) > 1 and not absent.isdisjoint(job.culprits)
        decidable = self.dimension.decidable and not hidden
        if self.fault == "device":  # all ranks issued the call: so they have in a job that runs
            decidable = self.dimension.dated
            if not self.dimension.recorded.get("timing", True):  # whose device began it?
                return Truth(self.name, verdicts, decidable=decidable)
        return Truth(self.name, verdicts, job.culprits, lines, decidable=decidable)

    def taken_at(self, folder: jobs.Folder) -> float | None:
        return folder.taken if self.dimension.dated else None


@functools.lru_cache(maxsize=2)
def _base(spec: Spec) -> jobs.Job:
    layout, micro_batches, layers = spec
    return jobs.healthy(layout, STEPS_OF_LARGE if spec in LARGE else STEPS, micro_batches, layers)


def cases(
    seeds: range, specs: Iterable[Spec] = (*LAYOUTS, *UNSEEN, *LARGE),
    dimensions: Iterable[jobs.Dimension] = jobs.DIMENSIONS,
) -> Iterator[Case]:  # fmt: skip
    """Yields each dimension and fault of each layout with each of ``seeds``; of large layouts only
    some, with the first seed."""
    for spec in specs:
        for dimension in dimensions:
            if spec in LARGE and dimension.name not in OF_LARGE:
                continue
            for fault in dimension.faults:
                of = seeds[:1] if fault == "none" or spec in LARGE else seeds
                yield from (Case(dimension, spec, fault, seed) for seed in of)


def ours(folder: Path, taken_at: float | None = None) -> Answer:
    (trial,) = examine([folder], taken_at).result.trials
    return Answer(
        trial.verdict in FAILURES, tuple(trial.culprits), trial.cause, verdict=trial.verdict
    )


def judged(case: Case, folder: jobs.Folder, tool: TorchFrTrace, place: Path) -> page.Judged:
    """Returns the case with our answer and torchfrtrace's on the same files; deletes the files."""
    written = folder.write(place / "dumps")
    try:
        theirs = tool.answer(written, incomplete=bool(folder.absent))
        own = ours(written, case.taken_at(folder))
        answers = {page.MOEDIAG: own, page.FRTRACE: theirs}
    finally:
        shutil.rmtree(written)
    return page.Judged(case.truth(folder), answers, case.fault, case.dimension.name, case.seen)
