"""Gradients are cleared between two updates of an optimizer."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.evidence.law_model import Cleared
from moediag.result import Verdict
from moediag.result.wording import listed

_ENOUGH = 2  # checked steps


@law(Verdict.WRONG_GRADIENTS)
def gradients_kept(facts: Facts) -> Findings:
    """The gradients of a watched job were never cleared between two updates."""
    # An optimizer is recognised by its class and the parameters that were followed.
    of: dict[tuple[str, tuple[str, ...]], list[Cleared]] = defaultdict(list)
    for own in facts.of(recorded).values():
        for one in own.cleared:
            of[one.optimizer, one.names].append(one)
    for (optimizer, names), records in of.items():
        steps = sorted({one.step for one in records})
        if len(steps) < _ENOUGH or not all(one.kept for one in records):
            continue
        at = f" at {records[0].line}" if records[0].line else ""
        yield Broken(
            f"After the checked steps ({', '.join(map(str, steps[:6]))}) nothing cleared the "
            f"gradients of {listed(names)} before {optimizer}.step(){at} was called again: each "
            "update also used the gradients of all updates before it.",
            pattern="kept",
            next_step="Call `optimizer.zero_grad()` once for each update, before the backward.",
        )
