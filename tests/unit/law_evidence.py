"""Builds what ranks record for the laws: one optimizer, some parameters, some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moediag.evidence.law_model import PART, REDUCED, LawCheck, LawPiece, RankLaws
from moediag.evidence.model import Evidence
from tests.unit.evidence_builder import Job, Op

STEPS = (1, 2, 3, 6)
NAMES = ("net.weight", "net.bias")
Change = Callable[[int, LawCheck], LawCheck]  # the rank, and the check as a healthy rank has it


def check(
    step: int, ranks: tuple[int, ...], how: str = REDUCED, names: Sequence[str] = NAMES
) -> LawCheck:
    """One step of a healthy rank."""
    part = "shard" if how == PART else ""
    values = tuple(f"{name}@{step}" for name in names)
    return LawCheck(
        key="a.0",
        optimizer="AdamW",
        step=step,
        count=step - 1,
        pieces=tuple(
            LawPiece(name, part, how, ranks, shape="8x8" if "weight" in name else "8")
            for name in names
        ),
        clocks=(2 * step,),
        params=values,
        grads=values,
        state={"exp_avg": values} if step > 1 else {},
        hyper=({"lr": "0.01", "weight_decay": "0.0", "fused": "None"},),
        line="train.py:9 main",
    )


def job(
    ranks: int,
    change: Change | None = None,
    how: str = REDUCED,
    steps: Sequence[int] = STEPS,
    names: Sequence[str] = NAMES,
) -> Evidence:
    """A job that ends normally; ``change`` is applied to each check of each rank."""
    every = tuple(range(ranks))
    calls = [Op("world", parameters=None)]
    found = Job({"world": (every, None)}, [calls] * ranks).run()
    recorded = {}
    for rank, seen in found.ranks.items():
        checks = [check(step, every, how, names) for step in steps]
        changed = [change(rank, one) if change else one for one in checks]
        recorded[rank] = replace(seen, laws=RankLaws(tuple(changed)))
    return replace(found, ranks=recorded, watched=True)


def with_events(evidence: Evidence, **events: Any) -> Evidence:
    """The job with events of kinds that only one law reads: those of all ranks, or a function of
    the rank that returns its own."""
    ranks = {}
    for rank, seen in evidence.ranks.items():
        laws = seen.laws or RankLaws()
        own = {kind: of(rank) if callable(of) else of for kind, of in events.items()}
        ranks[rank] = replace(seen, laws=replace(laws, others={**laws.others, **own}))
    return replace(evidence, ranks=ranks)


def other(row: tuple[str | None, ...], rank: int) -> tuple[str | None, ...]:
    """Other values than those of the other ranks."""
    return tuple(f"{value} of {rank}" for value in row)
