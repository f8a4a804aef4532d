"""A way to load a checkpoint delivered other bytes than the checkpoint has."""

from __future__ import annotations

from moediag.diagnosis.numbers.load_cost import LoadFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_WEIGHTS
SIGNATURE = "loaded by {methods}"


def find(facts: Facts) -> LoadFacts | None:
    return facts.loads if facts.loads.wrong else None


def judge(facts: Facts, found: LoadFacts) -> Judgement:
    text = "; ".join(found.wrong) + ". The method is at fault, no rank is."
    pattern = SIGNATURE.format(methods=", ".join(found.methods))
    return Judgement(Confidence.HIGH, text, pattern=pattern)
