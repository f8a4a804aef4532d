"""Cases of ``bench.jobs``: jobs of 16 to 1,024 ranks with pipeline, data, tensor and expert groups,
one fault in each, as Flight Recorder dumps in files. Our answer is that of `moediag diagnose`.

Seeds below TESTING are for tuning the diagnosis (``bench.labelled`` and the unit tests use only
those); seeds from TESTING on are for counting. LARGE and UNSEEN were not used in tuning.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import jobs
from bench.accuracy.counting import Answer, Truth
from bench.accuracy.frtrace import TorchFrTrace
from bench.labelled import LAYOUTS
from moediag.pipeline.examine import examine
from moediag.result import FAILURES

HEALTHY = ("none", "running")
# (layout, micro-batches, layers), as in LAYOUTS.
UNSEEN = (
    (jobs.Layout(8, 2, 2, 2), 3, 2),
    (jobs.Layout(1, 4, 4, 4), 3, 2),
    (jobs.Layout(4, 8, 1, 4), 2, 4),
    (jobs.Layout(2, 16, 2, 8), 1, 2),
)
LARGE = ((jobs.Layout(4, 16, 4, 8), 2, 2), (jobs.Layout(8, 16, 8, 16), 1, 2))
RINGS = (2000, 60)  # entries; the second has come round in every rank
STEPS, STEPS_OF_LARGE = 5, 2
SHARP = frozenset(("extra", "op", "size"))  # may be told as a mismatch as well as a hang


@dataclass(frozen=True)
class Case:
    """One case. ``ring`` is the number of entries that each rank keeps."""

    job: jobs.Job
    fault: str
    seed: int
    ring: int

    @property
    def truth(self) -> Truth:
        job = self.job
        name = f"{self.fault}, {job.layout.world} ranks, seed {self.seed}, ring {self.ring}"
        if self.fault in HEALTHY:
            return Truth(name, ("clean",))
        verdicts: tuple[str, ...] = ("hang",)
        if self.fault in SHARP:
            verdicts += ("collective-mismatch",)
        elif self.fault == "killed":
            verdicts += ("crash",)
        # Where a rank stands that never comes, no dump tells; where others wait for it, theirs do.
        known = jobs.Run(job).waiting_for(job.culprits[0]) if job.stuck else job.lines
        lines = tuple(f"train.py:{line}" for line in known)
        return Truth(name, verdicts, job.culprits, lines)


def cases(seeds: range) -> Iterator[Case]:
    """Yields each fault, layout and ring with each of ``seeds``; for large layouts only the first
    seed, with all records."""
    for spec in (*LAYOUTS, *UNSEEN):
        yield from _of(spec, STEPS, seeds, RINGS)
    for spec in LARGE:
        yield from _of(spec, STEPS_OF_LARGE, seeds[:1], RINGS[:1])


def _of(
    spec: tuple[jobs.Layout, int, int], steps: int, seeds: range, rings: tuple[int, ...]
) -> Iterator[Case]:
    layout, micro_batches, layers = spec
    base = jobs.healthy(layout, steps, micro_batches, layers)
    for ring in rings:
        yield Case(base, "none", 0, ring)
        for seed in seeds:
            yield Case(jobs.running(base, seed), "running", seed, ring)
            for fault in jobs.FAULTS:
                if fault != "skip-p2p" or layout.pp > 1:
                    yield Case(jobs.faulty(base, fault, seed), fault, seed, ring)


def ours(folder: Path) -> Answer:
    (trial,) = examine([folder]).result.trials
    return Answer(
        trial.verdict in FAILURES, tuple(trial.culprits), trial.cause, verdict=trial.verdict
    )


def answers(case: Case, tool: TorchFrTrace, place: Path) -> tuple[Answer, Answer]:
    """Returns our answer and torchfrtrace's on the same files, then deletes the files."""
    folder = jobs.write(case.job, place / "dumps", ring=case.ring)
    try:
        return ours(folder), tool.answer(folder, incomplete=bool(case.job.silent))
    finally:
        shutil.rmtree(folder)
