"""Finds training jobs among the processes of a user.

A rank is the outermost Python process with a rank's variables in its environment; what it starts
(workers of a data loader, compilers) inherits them. Variables of a framework (RANK, WORLD_SIZE)
count before those of MPI, and these before Slurm's: a launcher under srun has Slurm's, too. Ranks
that set their variables themselves, as with ``torch.multiprocessing.spawn`` and Ray, are siblings
that have loaded torch, and processes that were started one by one have connections with each other;
their numbers are known only from their stacks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import PurePath

from moediag.launch.attach.proc import LISTENS, TORCH, Connection, Proc, Seen, above, below
from moediag.records import dataclass

# Rank, world size, local rank, local world size; the later ones count only without the earlier.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)  # fmt: skip
# What ranks of one job have in common and those of another have not.
_KEYS = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMPI_MCA_orte_hnp_uri",
    "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
# A launcher, by a word of its command line.
_LAUNCHER = re.compile(
    r"(?:^|/)(?P<name>torchrun|deepspeed|mpirun|mpiexec|orterun|prterun|mpiexec\.hydra|srun|slurmstepd"
    r"|horovodrun|raylet)$"
    r"|^(?P<module>torch\.distributed\.(?:run|launch)|accelerate\.commands\.(?:launch|accelerate_cli)"
    r"|deepspeed\.launcher\.(?:runner|launch))$"
)
_ACCELERATE = re.compile(r"(?:^|/)accelerate$")
_PYTHON = re.compile(r"(?:^|/)(?:python|pypy)[\d.]*$")
_RAY = re.compile(r"^ray::(?P<actor>\w+)")
_LARGEST = 1 << 17  # ranks


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that says which rank it is."""

    pid: int
    started: int
    """Clock ticks since boot; together with the pid this identifies a process."""
    rank: int | None
    """None: it did not say; its stack may."""
    world_size: int | None
    local_rank: int | None = None
    local_size: int | None = None
    key: tuple[str, ...] = ()
    srun: int | None = None
    """The port at which the srun that started it listens."""


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one job on this machine."""

    ranks: tuple[Rank, ...]
    """In order of their numbers, then of their pids."""
    launcher: str = ""
    """torchrun, accelerate, mpirun, …; "" if unknown."""
    root: int = 0
    """The launcher's pid; that of the first rank without one."""
    command: tuple[str, ...] = field(default=())
    """The command line of its first rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the job, at least those that are here."""
        told = [rank.world_size or 0 for rank in self.ranks]
        numbers = [rank.rank + 1 for rank in self.ranks if rank.rank is not None]
        return max(*told, *numbers, len(self.ranks))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that belong to this machine, by the number of its ranks, and have no process."""
        places = {r.local_rank: r.rank for r in self.ranks if r.rank is not None}
        size = next((r.local_size for r in self.ranks if r.local_size), 0)
        first = next((r - p for p, r in places.items() if p is not None and r is not None), None)
        if first is None or any(p is None or r != first + p for p, r in places.items()):
            return ()
        return tuple(first + p for p in range(size or 0) if p not in places)

    @property
    def name(self) -> str:
        """Its script, or the first word that tells."""
        for word in self.command:
            if word.endswith(".py"):
                return PurePath(word).name
        actor = _RAY.match(self.command[0]) if self.command else None
        if actor is not None:
            return actor["actor"]
        module = next((b for a, b in itertools.pairwise(self.command) if a == "-m"), "")
        return module or (PurePath(self.command[0]).name if self.command else "job")


def of_user(proc: Proc, uid: int) -> list[Job]:
    """The jobs of user ``uid``, by the pid of their launchers."""
    every = proc.owned(uid)
    found = [job for job in _jobs(proc, every) if job.world_size > 1 or job.ranks[0].rank == 0]
    return found or [_job(proc, group, every) for group in _connected(proc, every)]


def of_process(proc: Proc, pid: int) -> list[Job]:
    """The job that process ``pid`` belongs to: a launcher, a rank, or a process of either; several
    if more than one runs below it. A Python process that belongs to none is a job with those that
    it has connections with, or of its own."""
    owner = proc.owner(pid)
    if owner is None:
        return []
    every = proc.owned(owner)
    line = {pid, *above(pid, every)}
    found = _jobs(proc, every)
    for job in found:
        if {rank.pid for rank in job.ranks} & line or job.root == pid:
            return [job]
    inside = {pid, *below(pid, every)}
    if started := [job for job in found if {rank.pid for rank in job.ranks} & inside]:
        return started
    listens = {int(own.rpartition(":")[2], 16) for own, _ in proc.connections(pid, LISTENS)}
    if by_port := [job for job in found if job.ranks[0].srun in listens]:
        return by_port  # srun: slurmd starts the ranks
    ends = {(other, own) for own, other in proc.connections(pid)}
    if actors := [j for j in found if j.launcher == "ray" and ends & proc.connections(j.root)]:
        return actors  # a driver of Ray: another process has started the raylet
    seen = every.get(pid)
    if seen is None or not _is_python(proc, pid) or _launcher(proc.command(pid)):
        return []  # the ranks of a launcher may not have started
    together = next((g for g in _connected(proc, every) if line & {one.pid for one in g}), None)
    return [_job(proc, together or [Rank(pid, seen.started, None, None)], every)]


# ------------------------------------------------------------------------ ranks


def _jobs(proc: Proc, every: Mapping[int, Seen]) -> list[Job]:
    alive = {pid: seen for pid, seen in every.items() if seen.state not in "ZXx"}
    told = {pid: rank for pid in alive if (rank := _rank(proc, alive[pid])) is not None}
    ranks = [told[pid] for pid in told if not _inherited(pid, told, alive)]
    ranks = [one for one in ranks if not _starts_ranks(one, ranks, alive)]
    numbered = {one.pid for one in ranks}
    groups = [*_grouped(ranks, alive), *_siblings(proc, alive, numbered)]
    return sorted((_job(proc, group, alive) for group in groups), key=lambda job: job.root)


def _rank(proc: Proc, seen: Seen) -> Rank | None:
    """The rank that a process was started as; None if it is no Python process, a launcher, or
    was not started as a rank."""
    if not _is_python(proc, seen.pid) or _launcher(proc.command(seen.pid)):
        return None
    own = proc.environment(seen.pid)
    for names in _VARIABLES:
        rank, size, place, here = (_number(own.get(name, "")) for name in names)
        if rank is not None and size is not None and rank < size <= _LARGEST:
            # A scheduler gives its variables to every program; one that trains has loaded torch.
            sure = names[0] == "RANK" and place is not None
            if not sure and not proc.maps(seen.pid, *TORCH):
                return None
            key = (names[0], *(own.get(name, "") for name in _KEYS))
            srun = _number(own.get("SLURM_SRUN_COMM_PORT", ""))
            return Rank(seen.pid, seen.started, rank, size, place, here, key, srun)
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 8 else None


def _is_python(proc: Proc, pid: int) -> bool:
    words = proc.command(pid)
    return bool(
        _PYTHON.search(proc.link(pid, "exe"))
        or (words and (_PYTHON.search(words[0]) or _RAY.match(words[0])))
    )


def _launcher(words: Sequence[str]) -> str:
    """The launcher that a command line starts, or ""."""
    for at, word in enumerate(words[:4]):
        if found := _LAUNCHER.search(word):
            name = found["name"] or found["module"].split(".")[0]
            return {"torch": "torchrun", "raylet": "ray"}.get(name, name)
        if _ACCELERATE.search(word) and "launch" in words[at + 1 :]:
            return "accelerate"
    return ""


def _inherited(pid: int, told: Mapping[int, Rank], every: Mapping[int, Seen]) -> bool:
    """Whether the process has its variables from a rank that started it."""
    own = told[pid]
    return any(
        other in told and (told[other].key, told[other].rank) == (own.key, own.rank)
        for other in above(pid, every)
    )


def _starts_ranks(one: Rank, ranks: Iterable[Rank], every: Mapping[int, Seen]) -> bool:
    """Whether the process only starts others that are ranks: its numbers are a node's or a
    scheduler's."""
    return any(
        _worth(other) > _worth(one) and one.pid in above(other.pid, every) for other in ranks
    )


def _worth(one: Rank) -> tuple[int, bool]:
    """How sure the variables are those of a rank, not of a node or a scheduler's task."""
    kinds = [names[0] for names in _VARIABLES]
    return -kinds.index(one.key[0]), one.local_rank is not None


def _grouped(ranks: Iterable[Rank], every: Mapping[int, Seen]) -> list[list[Rank]]:
    """Ranks by job. Where two have the same number, they are of different jobs: their parents
    decide."""
    together: dict[tuple[object, ...], list[Rank]] = {}
    for one in ranks:
        together.setdefault((one.key, one.world_size), []).append(one)
    found = []
    for group in together.values():
        if len({one.rank for one in group}) == len(group):
            found.append(group)
            continue
        apart: dict[int, list[Rank]] = {}
        for one in group:
            apart.setdefault(every[one.pid].ppid, []).append(one)
        found += apart.values()
    return found


def _siblings(proc: Proc, every: Mapping[int, Seen], numbered: set[int]) -> list[list[Rank]]:
    """Processes that may be ranks and were not started as such: actors of Ray, and at least two
    Python processes of one parent with torch, as ``torch.multiprocessing.spawn`` starts them. The
    workers of a data loader look the same; the stacks tell."""
    families: dict[tuple[int, str], list[Rank]] = {}
    for pid, seen in every.items():
        words = proc.command(pid)
        actor = _RAY.match(words[0]) if words else None
        spawned = any("multiprocessing.spawn" in word for word in words)
        spawned = spawned or (seen.ppid in every and words == proc.command(seen.ppid))
        if (
            not (actor or spawned)
            or (actor and actor["actor"] == "IDLE")
            or numbered & {pid, *above(pid, every)}
        ):
            continue
        if _is_python(proc, pid) and proc.maps(pid, *TORCH):
            kind = actor["actor"] if actor is not None else "spawn"
            families.setdefault((seen.ppid, kind), []).append(Rank(pid, seen.started, None, None))
    return [group for (_, kind), group in families.items() if len(group) > 1 or kind != "spawn"]


def _connected(proc: Proc, every: Mapping[int, Seen]) -> list[list[Rank]]:
    """Python processes with torch, at least two, that have TCP connections with each other. What
    one of them starts is part of it."""
    torch = {pid for pid in every if _is_python(proc, pid) and proc.maps(pid, *TORCH)}
    alone = [pid for pid in torch if not torch & {*above(pid, every)}]
    groups: list[tuple[set[int], set[Connection]]] = []
    for pid in alone:
        members, ends = {pid}, proc.connections(pid)
        for other in [group for group in groups if {(b, a) for a, b in ends} & group[1]]:
            groups.remove(other)
            members, ends = members | other[0], ends | other[1]
        groups.append((members, ends))
    return [
        [Rank(pid, every[pid].started, None, None) for pid in sorted(members)]
        for members, _ in groups if len(members) > 1
    ]  # fmt: skip


def _job(proc: Proc, group: Iterable[Rank], every: Mapping[int, Seen]) -> Job:
    ranks = tuple(sorted(group, key=lambda one: (one.rank is None, one.rank or 0, one.pid)))
    launcher, root = "", ranks[0].pid
    for pid in above(ranks[0].pid, every):
        if name := _launcher(proc.command(pid)):
            launcher, root = name, pid  # the outermost: `accelerate launch` runs torchrun
    if not launcher:
        parents = {every[one.pid].ppid for one in ranks}
        if len(ranks) > 1 and len(parents) == 1 and _is_python(proc, (parent := parents.pop())):
            launcher, root = "python", parent
    return Job(ranks, launcher, root, proc.command(ranks[0].pid))
