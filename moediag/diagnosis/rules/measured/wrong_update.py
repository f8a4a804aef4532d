"""The optimizer's weights, learning rate or count of updates differ from a single process's.

This applies only after a step with correct gradients and equal replicas; otherwise those decide.
"""

from __future__ import annotations

from moediag.diagnosis.numbers.optimizer_update import AppliedFacts, sentence
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, few
from moediag.diagnosis.words.verify_sentences import of_otherwise
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_WEIGHTS


def find(facts: Facts) -> AppliedFacts | None:
    found, first, wrong = facts.applied, facts.replicas.first, facts.first_wrong
    if found.step is None or (wrong is not None and wrong <= found.step):
        return None
    return None if first is not None and first.step <= found.step else found


def judge(facts: Facts, found: AppliedFacts) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        " ".join(filter(None, (sentence(found), of_otherwise(facts.evidence)))),
        culprits=few(found.ranks, facts.evidence),
        pattern=found.what,
        until=found.step,
    )
