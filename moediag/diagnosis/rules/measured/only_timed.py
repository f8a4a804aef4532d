"""Steps were timed, and nothing was compared."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.CLEAN


def find(facts: Facts) -> bool | None:
    outcomes = (seen.outcome for seen in facts.evidence.ranks.values())
    return any(outcome is not None and outcome.cost for outcome in outcomes) or None


def judge(facts: Facts, found: bool) -> Judgement:
    return Judgement(Confidence.LOW, "Only timed; nothing was compared.")
