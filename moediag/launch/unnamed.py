"""Finds ranks that have not named themselves: they wait before they import torch.distributed, or
their launcher tells them no RANK and they wait before ``init_process_group``. Processes that
``multiprocessing`` spawned learn their rank as an argument; they are started in its order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from moediag.launch.attach.proc import Proc
from moediag.launch.processes import Process, ProcStat

# The first counts alone where any process has it: an elastic agent under srun has Slurm's.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL = "LOCAL_RANK"


def unnamed(
    family: Iterable[ProcStat], known: Mapping[int, Process], ranks: Collection[int]
) -> dict[int, Process]:
    """Returns the Python processes of ``family`` that were started as one of ``ranks``, none of
    them a child of another. A LOCAL_RANK counts as those of the ``known`` ranks show. A rank that
    was started without any may have started the others, as Lightning's first one does."""
    proc = Proc()
    own = {process.pid: proc.environment(process.pid) for process in known.values()}
    taken = {pid for pid, variables in own.items() if variables.keys() & {*_RANK, _LOCAL}}
    first = _first_rank(proc, known)
    found: dict[int, Process] = {}
    oldest = sorted(family, key=lambda stat: (stat.started, stat.pid))
    parents = {stat.pid: stat.ppid for stat in oldest}
    told = {
        s.pid: proc.environment(s.pid)
        for s in oldest
        if proc.link(s.pid, "exe").rpartition("/")[2].startswith("python")
    }
    names = _RANK[:1] if any(_RANK[0] in variables for variables in told.values()) else _RANK
    for stat in oldest:
        if stat.pid not in told or _is_below(stat.pid, parents, taken):
            continue
        number = _rank(told[stat.pid], names, first)
        if number is not None and number in ranks and number not in found:
            found[number] = stat.process
            taken.add(stat.pid)
    return found or _spawned([s for s in oldest if s.pid in told], known, ranks, proc)


def _spawned(
    oldest: Iterable[ProcStat], known: Mapping[int, Process], ranks: Collection[int], proc: Proc
) -> dict[int, Process]:
    """The same of the children of the process that started all ``known`` ranks, by their order. A
    child that is no rank is noticed by their number; then none is known."""
    parents = {stat.ppid if (stat := one.stat()) else None for one in known.values()}
    children = [
        stat.process
        for stat in oldest
        if parents == {stat.ppid} and "resource_tracker" not in proc.text(stat.pid, "cmdline")
    ]
    first = {rank - children.index(one) for rank, one in known.items() if one in children}
    if len(first) != 1 or (len(known) + len(ranks)) % len(children) or min(first) % len(children):
        return {}
    numbered = enumerate(children, min(first))
    return {number: one for number, one in numbered if number in ranks and number not in known}


def _first_rank(proc: Proc, known: Mapping[int, Process]) -> int | None:
    """The rank of this node's LOCAL_RANK 0; None if the ``known`` ranks do not show it."""
    local = {rank: proc.environment(one.pid).get(_LOCAL, "0") for rank, one in known.items()}
    first = {rank - int(number) if number.isdecimal() else None for rank, number in local.items()}
    return first.pop() if len(first) == 1 else None


def _rank(environment: Mapping[str, str], names: Sequence[str], first: int | None) -> int | None:
    for name in names:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    local = environment.get(_LOCAL, "")
    return first + int(local) if first is not None and local.isdecimal() else None


def _is_below(pid: int, parents: Mapping[int, int], taken: Collection[int]) -> bool:
    """Whether ``pid`` is one of ``taken`` or a descendant, such as a worker of a data loader."""
    while pid in parents:
        if pid in taken:
            return True
        pid = parents[pid]
    return pid in taken
