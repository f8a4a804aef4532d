"""The checks of each optimizer, for the laws that ask whether its parameters train."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import recorded
from moediag.evidence.law_model import LawCheck
from moediag.evidence.model import Evidence

ENOUGH = 3  # checked steps

Checks = dict[int, list[LawCheck]]  # of one optimizer, by rank


def optimizers(evidence: Evidence) -> tuple[Checks, ...]:
    """The checks of each optimizer."""
    found: dict[str, Checks] = defaultdict(lambda: defaultdict(list))
    for rank, own in recorded(evidence).items():
        for check in own.checks:
            if check.optimizer:
                found[check.key][rank].append(check)
    return tuple(found.values())


def long(facts: Facts) -> list[Checks]:
    """Optimizers that were checked often enough on every rank."""
    every = facts.of(optimizers)
    return [of for of in every if all(len(checks) >= ENOUGH for checks in of.values())]


def class_of(of: Checks) -> str:
    """The optimizer's class."""
    return next(iter(of.values()))[0].optimizer


def rate(check: LawCheck, group: int) -> float:
    """The learning rate of a parameter group; 0 if it is unknown."""
    text = check.hyper[group].get("lr", "0") if group < len(check.hyper) else "0"
    try:
        return float(text)
    except ValueError:
        return 0.0
