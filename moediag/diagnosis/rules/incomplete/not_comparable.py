"""A job's measurements cannot be compared with those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

if TYPE_CHECKING:
    from moediag.protocol import Outcome

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> Outcome | None:
    """The outcome that says why."""
    outcomes = (seen.outcome for seen in facts.evidence.ranks.values())
    return next((o for o in outcomes if o is not None and o.incomparable), None)


def judge(facts: Facts, found: Outcome) -> Judgement:
    text = found.incomparable[:1].upper() + found.incomparable[1:]
    return Judgement(Confidence.LOW, text, next_step=found.next_step)
