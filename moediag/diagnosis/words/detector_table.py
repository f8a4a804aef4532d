"""Shows what each check reports of one step, side by side, and which alone would have missed it.

A fix is often checked with only one of them. Equal replicas may all hold a wrong gradient, a router
that learns correctly may pass a wrong gradient down, and the loss of the first step is exact
whatever the backward does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moediag.diagnosis.numbers import by_part
from moediag.diagnosis.numbers.by_part import Part
from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.numbers.replicas import GRADIENTS, ReplicaFacts
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import SAME_LOSS
from moediag.records import dataclass
from moediag.result import Cell, Table

LOSS, REPLICAS, ROUTER, INPUT, OTHERS = "loss", "replicas", "router", "input", "others"
_NOTE = (
    "Errors of the first step: of the loss; of gradients that replicas should have alike, as "
    "shares of their norm; of the gradients of the router, of the block's input and of all others, "
    "as shares of the largest reference value. 0: within the tolerance."
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one detector saw in the first step."""

    detector: str
    error: float
    """Relative; infinite where only some ranks have the gradient."""
    wrong: bool
    """The error exceeds the tolerance."""


def seen(evidence: Evidence, numbers: GradientFacts, replicas: ReplicaFacts) -> tuple[Seen, ...]:
    """All five, in table order; empty where no block input was compared, which the table is about,
    or where the trial ran a whole model."""
    outcomes = [s.outcome for s in evidence.ranks.values() if s.outcome is not None]
    if not evidence.program or not any(o.inputs for o in outcomes):
        return ()
    found = by_part.parts(evidence, 1)
    loss = numbers.loss_error if numbers.step in (None, 1) else None
    apart = [d for d in replicas.found if d.what == GRADIENTS and d.step == 1]
    size = max((math.inf if d.size is None else d.size for d in apart), default=0.0)
    return (
        Seen(LOSS, loss or 0.0, (loss or 0.0) > SAME_LOSS),
        Seen(REPLICAS, size, bool(apart)),
        _of_parts(ROUTER, [p for p in found if p.kind == by_part.ROUTER]),
        _of_parts(INPUT, [p for p in found if p.kind == by_part.INPUT]),
        _of_parts(OTHERS, [p for p in found if p.kind in (by_part.EXPERTS, by_part.REST)]),
    )


def _of_parts(detector: str, of_kind: Sequence[Part]) -> Seen:
    wrong = [p for p in of_kind if p.wrong]
    errors = [p.error / p.scale if p.scale else math.inf for p in wrong]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
    return Seen(detector, worst, bool(wrong))


def table(found: Sequence[Seen]) -> Table | None:
    """One row; the run's table stacks those of its variants."""
    if not found:
        return None
    who = [s.detector for s in found if s.wrong]
    row: tuple[Cell, ...] = (
        *(_short(s) for s in found),
        "wrong" if who else "right",
        ", ".join(who) or "-",
    )
    return Table(
        title="What each detector sees in step 1",
        columns=(*(s.detector for s in found), "judged", "seen by"),
        rows=(row,),
        note=_NOTE,
    )


def _short(seen: Seen) -> Cell:
    """The error with two digits: further digits differ between machines."""
    return float(f"{seen.error:.2g}") if seen.wrong else 0.0
