"""In what dumps differ from complete ones of one fault: each dimension is one row of DIMENSIONS and
at most one change of the folder. What is true of a case is the injected fault alone."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.jobs.device import Run
from bench.jobs.faults import FAULTS, NODE, another, faulty, running
from bench.jobs.recorded import dumps
from bench.jobs.schedules import Job, Layout, healthy
from bench.jobs.written import Folder, folder_of

HEALTHY = ("none", "running", "straggler")
HANGS = ("stuck", "killed")
Change = Callable[[Folder, random.Random], None]
_UNTIMED: Mapping[str, Any] = {"timing": False}  # torch's default
_WRAPPED: Mapping[str, Any] = {"timing": False, "ring": 60}
_ACTIVE: Mapping[str, Any] = {"timing": False, "active_only": True}


@dataclass(frozen=True)
class Dimension:
    """One row. ``recorded``: options of ``dumps``; ``where``: where the culprits after the first
    are (``node``, ``apart``); ``decidable``: the evidence shows the culprits, so naming nobody is a
    miss; ``dated``: the user tells when the dumps were written."""

    name: str
    faults: tuple[str, ...] = HANGS
    recorded: Mapping[str, Any] = field(default_factory=lambda: _UNTIMED)
    culprits: int = 1
    where: str = "node"
    change: Change | None = None
    decidable: bool = True
    dated: bool = False

    def job(self, base: Job, fault: str, seed: int) -> Job:
        """Returns ``base`` with this fault. Raises ValueError if its layout cannot have it."""
        if fault == "none":
            return base
        if fault == "running":
            return running(base, seed)
        if fault == "straggler":  # runs, but one rank has not yet issued what others wait for
            job = faulty(base, "stuck", seed)
            return replace(job, fault=fault, culprits=(), at={}, lines=())
        job = faulty(base, fault, seed)
        for _ in range(self.culprits - 1):
            job = another(job, seed, self.where)
        return job

    def folder(self, job: Job, seed: int) -> Folder:
        found = folder_of(job, **self.recorded)
        if self.change is not None:
            # By name: whoever tunes on one dimension has not seen the draws of another.
            self.change(found, random.Random(f"{self.name} {seed} {job.layout}"))  # noqa: S311
        return found


# ------------------------------------------------------------------------ changes


def copied(folder: Folder, _: random.Random) -> None:
    folder.copied = True


def without_innocents(share: float) -> Change:
    """Returns a change that removes this share of the innocent ranks' dumps, at least one."""

    def change(folder: Folder, chance: random.Random) -> None:
        innocent = sorted(folder.dumps.keys() - set(folder.job.culprits))
        for rank in chance.sample(innocent, max(1, int(share * len(innocent)))):
            del folder.dumps[rank]

    return change


def one_dump(folder: Folder, chance: random.Random) -> None:
    kept = chance.choice(sorted(folder.dumps))
    folder.dumps = {kept: folder.dumps[kept]}


def culprit_absent_too(folder: Folder, chance: random.Random) -> None:
    without_innocents(0)(folder, chance)
    folder.dumps.pop(folder.job.culprits[0], None)


def dumped_twice(folder: Folder, _: random.Random) -> None:
    """Adds a second dump: of a hanging job the same, of a running one some calls later."""
    job, options = folder.job, {"timing": False}
    folder.copied = True
    if job.until is not None:
        more = replace(job, until=min(job.until + 40 * job.layout.world, Run(_whole(job)).met))
        folder.second = dict(dumps(more, **options))
    elif job.fault == "straggler":
        folder.second = dict(dumps(replace(job, stuck={}), **options))
    else:
        folder.second = dict(dumps(job, **options))


def two_attempts(folder: Folder, chance: random.Random) -> None:
    """Leaves some ranks' dumps of an attempt one hour earlier: they wrote none this time."""
    base = healthy(folder.job.layout, 3)
    _overwrite(folder, dict(dumps(running(base, chance.randrange(100)), timing=False)), chance)


def two_jobs(folder: Folder, chance: random.Random) -> None:
    """Puts dumps of another job with other groups, one hour earlier, in place of some."""
    other = healthy(Layout(dp=folder.job.layout.world), 3)
    _overwrite(folder, dict(dumps(faulty(other, "stuck", 1), timing=False)), chance)


def clocks_apart(folder: Folder, chance: random.Random) -> None:
    """Sets the clock of each node up to 20 s wrong."""
    wrong = [chance.uniform(-20, 20) for _ in range(folder.job.layout.world // NODE + 1)]
    for rank, raw in folder.dumps.items():
        _shift(raw, wrong[rank // NODE])


def random_bytes(folder: Folder, chance: random.Random) -> None:
    """Fills an innocent rank's file with random bytes."""
    folder.damaged = {_innocent(folder, chance): chance.randbytes(5000)}


def cut_short(folder: Folder, chance: random.Random) -> None:
    """Leaves the first half of an innocent rank's file."""
    rank = _innocent(folder, chance)
    whole = pickle.dumps(folder.dumps[rank], protocol=2)
    folder.damaged = {rank: whole[: len(whole) // 2]}


def _innocent(folder: Folder, chance: random.Random) -> int:
    return chance.choice(sorted(folder.dumps.keys() - set(folder.job.culprits)))


def _overwrite(folder: Folder, others: Mapping[int, dict[str, Any]], chance: random.Random) -> None:
    for rank in chance.sample(sorted(others), max(1, len(others) // 8)):
        folder.dumps[rank] = others[rank]
        _shift(others[rank], -3600)


def _shift(raw: dict[str, Any], seconds: float) -> None:
    for entry in raw["entries"]:
        for key in ("created", "discovered_started", "discovered_completed"):
            if entry[f"time_{key}_ns"] is not None:
                entry[f"time_{key}_ns"] += int(seconds * 1e9)


def _whole(job: Job) -> Job:
    return replace(job, until=None)


# ------------------------------------------------------------------------ the table

DIMENSIONS = (
    Dimension("started times recorded", ("none", "running", *FAULTS), {}),
    Dimension("no started times", ("none", "running", *FAULTS)),
    Dimension("only the last 60 calls", ("none", "running", *FAULTS), _WRAPPED),
    Dimension("active-only", ("none", "running", *FAULTS), _ACTIVE),
    Dimension("two culprits, one node", culprits=2),
    Dimension("two culprits, apart", culprits=2, where="apart"),
    Dimension("two culprits, one node, active-only", recorded=_ACTIVE, culprits=2),
    Dimension("two culprits, apart, active-only", recorded=_ACTIVE, culprits=2, where="apart"),
    Dimension("three culprits, active-only", ("stuck",), _ACTIVE, 3),
    Dimension("two wrong sizes, apart", ("size", "op"), culprits=2, where="apart"),
    Dimension("an innocent rank absent", ("running", *HANGS), change=without_innocents(0)),
    Dimension("half of the innocent absent", ("running", *HANGS), change=without_innocents(0.5)),
    Dimension("half absent, active-only", ("running", *HANGS), _ACTIVE,
              change=without_innocents(0.5)),
    Dimension("culprit and an innocent absent", ("stuck",), change=culprit_absent_too,
              decidable=False),
    Dimension("one dump of all", ("none", "running", "stuck"), change=one_dump, decidable=False),
    Dimension("copied files", ("none", "running", *HANGS), change=copied),
    Dimension("copied files, active-only", ("none", "running", *HANGS), _ACTIVE, change=copied),
    Dimension("dated files", ("running", "straggler", "device", *HANGS), change=copied, dated=True),
    Dimension("one rank late", ("straggler",)),
    Dimension("one rank late, started times recorded", ("straggler",), {}),
    Dimension("one rank late, copied files", ("straggler",), change=copied),
    Dimension("dumped twice", ("running", "straggler", *HANGS), change=dumped_twice),
    Dimension("dumps of two attempts", change=two_attempts, decidable=False),
    Dimension("dumps of two jobs", change=two_jobs, decidable=False),
    Dimension("clocks apart", ("none", "running", *HANGS), change=clocks_apart),
    Dimension("a file of random bytes", ("none", *HANGS), change=random_bytes),
    Dimension("a file cut short", ("none", *HANGS), change=cut_short),
)  # fmt: skip
