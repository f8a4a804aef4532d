"""Faults: what one rank or several do otherwise than the rest of the job."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from bench.jobs.device import Run
from bench.jobs.schedules import P2P, P2P_LINES, Job, Layout

FAULTS = ("skip", "extra", "op", "size", "order", "stuck", "killed", "device", "skip-p2p")
NEW_LINES = {"extra": 900, "op": 901}  # where the culprit makes a call that nobody else makes
NODE = 8  # ranks of one machine


def faulty(job: Job, fault: str, seed: int) -> Job:
    """Returns ``job`` with one fault on one rank in its second half. Raises ValueError if this
    layout cannot have that fault."""
    chance = random.Random(f"{fault} {seed} {job.layout}")  # noqa: S311 - repeatable
    rank = chance.randrange(job.layout.world)
    half = len(job.programs[rank]) // 2
    wanted = [at for at in range(half + 1, len(job.programs[rank])) if _has(job, fault, rank, at)]
    if not wanted:
        raise ValueError(f"{job.layout} has no place for {fault}")
    return _injected(job, fault, rank, chance.choice(wanted))


def another(job: Job, seed: int, where: str) -> Job:
    """Returns ``job`` with its fault on one more rank: on the ``node`` of the first culprit, or
    ``apart`` from all of them, in no group with them but the world.

    The fault is at the call in which this rank would wait for the others. So every culprit's device
    reaches its fault, and all faults are in the dumps. Raises ValueError if there is no such rank.
    """
    chance = random.Random(f"another {seed} {job.layout} {job.culprits}")  # noqa: S311
    run = Run(job)
    ranks = [rank for rank in range(job.layout.world) if _is_where(job, rank, where)]
    for rank in chance.sample(ranks, len(ranks)):
        at = run.place(rank)
        if at is None or not _has(job, job.fault, rank, at):
            continue
        made = _injected(job, job.fault, rank, at)
        if Run(made).reached():
            return made
    raise ValueError(f"{job.layout} has no place for another {job.fault}")


def running(job: Job, seed: int) -> Job:
    """Returns ``job`` dumped while it runs, somewhere in its second half."""
    chance = random.Random(f"running {seed} {job.layout}")  # noqa: S311 - repeatable
    calls = Run(job).met
    return replace(job, until=chance.randrange(calls // 2, calls - 1), chance=seed)


def _is_where(job: Job, rank: int, where: str) -> bool:
    if rank in job.culprits:
        return False
    if where == "node":
        return rank // NODE == job.culprits[0] // NODE
    return not any(
        rank in ranks and set(job.culprits) & set(ranks)
        for axis, of in job.layout.groups().items()
        if axis != "world"
        for ranks in of
    )


@lru_cache(maxsize=64)
def _groups_of(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    return {axis: r for axis, of in layout.groups().items() for r in of if rank in r}


def _has(job: Job, fault: str, rank: int, at: int) -> bool:
    """Whether this call can have that fault."""
    groups, op = _groups_of(job.layout, rank), job.programs[rank][at]
    return (
        op.axis in groups
        and (op.op in P2P) == (fault == "skip-p2p")
        and (fault != "order" or _swappable(job, rank, at, groups))
    )


def _swappable(job: Job, rank: int, at: int, groups: dict[str, tuple[int, ...]]) -> bool:
    """Whether two neighbouring collectives of different groups share two ranks, so that swapping
    them makes each wait for the other's group."""
    program = job.programs[rank]
    if at + 1 >= len(program) or program[at + 1].op in P2P:
        return False
    a, b = program[at].axis, program[at + 1].axis
    if a == b or a not in groups or b not in groups:
        return False
    return len(set(groups[a]) & set(groups[b])) > 1


def _injected(job: Job, fault: str, rank: int, at: int) -> Job:
    program, programs = list(job.programs[rank]), list(job.programs)
    op = program[at]
    lines: tuple[int, ...] = (op.line,)
    made = replace(
        job, fault=fault, programs=programs, at=job.at | {rank: at},
        culprits=tuple(sorted((*job.culprits, rank))),
    )  # fmt: skip
    if fault in ("skip", "skip-p2p"):
        del program[at]
        if fault == "skip-p2p":  # the peer waits at the other end of the channel
            lines = tuple(op.line // 100 * 100 + end for end in P2P_LINES)
    elif fault == "extra":
        program.insert(at, replace(op, numel=op.numel * 3, line=NEW_LINES[fault]))
    elif fault == "op":
        new = "broadcast" if op.op != "broadcast" else "all_reduce"
        program[at] = replace(op, op=new, line=NEW_LINES[fault])
    elif fault == "size":
        program[at] = replace(op, op="all_reduce" if op.op == "all_to_all" else op.op,
                              numel=op.numel * 2)  # fmt: skip
    elif fault == "order":
        lines = (op.line, program[at + 1].line)
        program[at], program[at + 1] = program[at + 1], program[at]
    elif fault in ("stuck", "killed"):
        made.stuck = job.stuck | {rank: at}
        made.silent = job.silent | ({rank} if fault == "killed" else set())
    elif fault == "device":
        made.dead_device = job.dead_device | {rank: at}
    programs[rank] = program
    made.lines = job.lines + ((NEW_LINES[fault],) if fault in NEW_LINES else lines)
    return made
