"""Every way to load a checkpoint delivered its bytes."""

from __future__ import annotations

from moediag.diagnosis.numbers.load_cost import LoadFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.CLEAN


def find(facts: Facts) -> LoadFacts | None:
    return facts.loads if facts.loads.loads else None


def judge(facts: Facts, found: LoadFacts) -> Judgement:
    return Judgement(Confidence.HIGH, found.summary)
