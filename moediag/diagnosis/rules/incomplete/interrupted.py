"""The user interrupted the run."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> bool | None:
    return facts.evidence.interrupted or None


def judge(facts: Facts, found: bool) -> Judgement:
    return undecided("The run was interrupted before it ended.")
