"""Ranks that average their gradients trained on the same part of one process's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

if TYPE_CHECKING:
    from moediag.protocol import Outcome

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> Outcome | None:
    """The outcome that says how."""
    outcomes = (seen.outcome for seen in facts.evidence.ranks.values())
    return next((o for o in outcomes if o is not None and o.repeats), None)


def judge(facts: Facts, found: Outcome) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        found.repeats[:1].upper() + found.repeats[1:],
        next_step=found.next_step,
        pattern="repeated samples",
    )
