"""A rank left no measurements and no error that explains why."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> list[int] | None:
    """The ranks without an outcome; empty where they left no evidence at all."""
    if facts.gradients.measured:
        return None
    return [r for r, seen in sorted(facts.evidence.ranks.items()) if seen.outcome is None]


def judge(facts: Facts, found: list[int]) -> Judgement:
    who = ranks(found).capitalize() if found else "Not every rank"
    return undecided(f"{who} left no measurements, and no error that says why.")
