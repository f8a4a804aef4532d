"""The norm used for clipping is equal on every rank and wrong, before any gradient was wrong.

This makes the gradients wrong too: the optimizer gets them scaled by a wrong factor.
"""

from __future__ import annotations

from moediag.diagnosis.numbers.norms import WrongNorm
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words.replica_sentences import of_wrong_norm
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS
SIGNATURE = "clipping norm"


def find(facts: Facts) -> WrongNorm | None:
    norm, wrong = facts.replicas.wrong_norm, facts.first_wrong
    if norm is None or not facts.gradients.compared:
        return None
    return norm if wrong is None or norm.step < wrong else None


def judge(facts: Facts, found: WrongNorm) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        of_wrong_norm(found),
        pattern=SIGNATURE,
        until=facts.gradients.step,
        gradients=True,
    )
