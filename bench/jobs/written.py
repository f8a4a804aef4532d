"""The files that a simulated job leaves: one per rank, named as by NCCL's own writer."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.jobs.recorded import BEGAN, TIMEOUT, as_json, dumps
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

    def write(self, place: Path, form: str = "pickle") -> Path:
        first = place / "first" if self.second else place
        for folder, of_rank in ((first, self.dumps), (place / "second", self.second)):
            for rank, raw in of_rank.items():
                self._file(folder / f"nccl_trace_rank_{rank}", rank, raw, form)
        place.mkdir(parents=True, exist_ok=True)  # of a job that left nothing
        return place

    def _file(self, path: Path, rank: int, raw: dict[str, Any], form: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if rank in self.damaged:
            path.write_bytes(self.damaged[rank])
        elif form == "pickle":
            path.write_bytes(pickle.dumps(raw, protocol=2))  # torch writes this protocol
        else:
            path.write_text(json.dumps(as_json(raw)))
        age = self.taken + (LATER if self.copied else 0)
        os.utime(path, (age, age))


def folder_of(job: Job, **options: Any) -> Folder:
    """Returns the dumps of a job: of one that hangs as its watchdog writes them, when the oldest
    call in progress times out; of another, at its newest call."""
    of_rank = dict(dumps(job, **options))
    return Folder(job, of_rank, _taken(job, of_rank))


def _taken(job: Job, of_rank: Dumps) -> float:
    entries = [entry for raw in of_rank.values() for entry in raw["entries"]]
    opened = [e["time_created_ns"] for e in entries if e["time_discovered_completed_ns"] is None]
    newest = max((entry["time_created_ns"] for entry in entries), default=BEGAN)
    if job.culprits and opened:
        return max(min(opened) / 1e9 + TIMEOUT / 1e3, newest / 1e9) + 1
    return newest / 1e9


def write(job: Job, place: Path, form: str = "pickle", **options: Any) -> Path:
    return folder_of(job, **options).write(place, form)
