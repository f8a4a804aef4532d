"""The files that a simulated job leaves: one per rank, named as by NCCL's own writer."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.jobs.device import Run
from bench.jobs.recorded import as_json, dumps, taken
from bench.jobs.schedules import Job

Dumps = dict[int, dict[str, Any]]
LATER = 3 * 86_400  # seconds after the dump at which files were copied


@dataclass
class Folder:
    """What is in a folder. ``taken``: when the dumps were written, in seconds of the wall clock;
    that is the files' age, too, unless they were ``copied``."""

    job: Job
    dumps: Dumps
    taken: float
    copied: bool = False
    second: Dumps = field(default_factory=dict)  # a later dump of each rank
    damaged: dict[int, bytes] = field(default_factory=dict)  # files that nobody can read

    @property
    def absent(self) -> set[int]:
        """The ranks of which no dump can be read."""
        return set(range(self.job.layout.world)) - (self.dumps.keys() - self.damaged.keys())

    def write(self, place: Path) -> Path:
        first = place / "first" if self.second else place
        age = self.taken + (LATER if self.copied else 0)
        for folder, of_rank in ((first, self.dumps), (place / "second", self.second)):
            for rank, raw in of_rank.items():
                _write(folder, rank, self.damaged.get(rank, raw), age)
        place.mkdir(parents=True, exist_ok=True)  # of a job that left nothing
        return place


def folder_of(job: Job, **options: Any) -> Folder:
    run = Run(job)
    return Folder(job, dict(dumps(job, run=run, **options)), taken(run))


def write(
    job: Job, place: Path, form: str = "pickle", run: Run | None = None, **options: Any
) -> Path:
    """Writes the dumps of ``job`` one after the other: those of a large job fill the memory."""
    run = run or Run(job)
    age = taken(run)
    for rank, raw in dumps(job, run=run, **options):
        _write(place, rank, raw, age, form)
    return place


def _write(
    folder: Path, rank: int, content: dict[str, Any] | bytes, age: float, form: str = "pickle"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nccl_trace_rank_{rank}"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif form == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))  # torch writes this protocol
    else:
        path.write_text(json.dumps(as_json(content)))
    os.utime(path, (age, age))
