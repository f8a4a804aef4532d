"""A worker reports why this trial cannot run on this stack."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.NOT_APPLICABLE


def find(facts: Facts) -> tuple[str, ...] | None:
    """The reasons, each once."""
    outcomes = (seen.outcome for seen in facts.evidence.ranks.values())
    reasons = (outcome.applicable for outcome in outcomes if outcome is not None)
    return tuple(dict.fromkeys(reason for reason in reasons if reason)) or None


def judge(facts: Facts, found: tuple[str, ...]) -> Judgement:
    return Judgement(Confidence.HIGH, "; ".join(found))
