"""A metric is wrong, and no wrong gradient was found."""

from __future__ import annotations

from moediag.diagnosis.numbers.metrics import MetricFacts, sentence
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_METRICS


def find(facts: Facts) -> MetricFacts | None:
    return facts.metrics if facts.metrics.step is not None else None


def judge(facts: Facts, found: MetricFacts) -> Judgement:
    text = sentence(found)
    if facts.gradients.compared:
        text += " All compared gradients match the single process."
    return Judgement(Confidence.HIGH, text, pattern=found.pattern, until=found.step)
