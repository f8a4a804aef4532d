"""A rank that loads with methods that are wrong on purpose, beside the right ones."""

from __future__ import annotations

import torch.distributed as dist

from moediag.worker import rank
from moediag.worker.tasks import load_methods
from moediag.worker.tasks.load_methods import Job


def warm(families: list[str]) -> None:
    import torch.distributed.launcher.api  # noqa: F401


def first_rows_for_all(job: Job) -> None:
    """Every rank keeps rank 0's cut."""
    mine = job.rank
    shards = {}
    for name in job.targets:
        full = job.full(name)
        dist.broadcast(full, src=0)
        job.rank = 0
        shards[name] = job.shard(name, full)
        job.rank = mine
    job.assign(shards)


def nothing_sent(job: Job) -> None:
    """The broadcast is left out: the other ranks keep whatever their memory held."""
    job.assign({name: job.shard(name, job.full(name)) for name in job.targets})


def main(trial_path: str) -> None:
    load_methods.METHODS["first-rows-for-all"] = (first_rows_for_all, None)
    load_methods.METHODS["nothing-sent"] = (nothing_sent, None)
    rank.main(trial_path)
