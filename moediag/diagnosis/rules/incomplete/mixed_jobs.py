"""The files are not of one job, so nothing is compared."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> str | None:
    return facts.evidence.mixed or None


def judge(facts: Facts, found: str) -> Judgement:
    return undecided(found, "Diagnose the dumps of each job alone.")
