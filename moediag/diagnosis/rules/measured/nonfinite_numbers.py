"""A loss, a gradient or a gradient norm is nan or infinite."""

from __future__ import annotations

from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, few
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.NONFINITE


def find(facts: Facts) -> GradientFacts | None:
    return facts.gradients if facts.gradients.nonfinite else None


def judge(facts: Facts, found: GradientFacts) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        f"On {ranks(found.nonfinite_ranks)} {found.nonfinite}.",
        culprits=few(found.nonfinite_ranks, facts.evidence),
        until=found.step,
    )
