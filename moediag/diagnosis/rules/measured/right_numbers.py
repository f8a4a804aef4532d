"""Everything that was compared is correct. Schedules that differ are noted."""

from __future__ import annotations

from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import cause
from moediag.result import Confidence, Verdict
from moediag.result.wording import error_size, plural

VERDICT = Verdict.CLEAN


def find(facts: Facts) -> GradientFacts | None:
    return facts.gradients if facts.gradients.compared else None


def judge(facts: Facts, found: GradientFacts) -> Judgement:
    d = facts.divergence
    text = f"{plural(found.compared, 'gradient')} match the reference on every rank; largest "
    text += f"error {error_size(found.error)}."
    if facts.ownership.experts:
        text += f" All {facts.ownership.experts} experts of each layer are where they belong."
    if d is None:
        return Judgement(Confidence.HIGH, text)
    why = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False)
    note = f"the schedules differ, although the result is correct: {why}"
    return Judgement(Confidence.MEDIUM, text, notes=(note,))
