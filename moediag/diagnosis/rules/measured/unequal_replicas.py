"""Values that must be equal on several ranks differ, before any gradient was wrong."""

from __future__ import annotations

from moediag.diagnosis.numbers.replicas import Disagreement
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.diagnosis.words.replica_sentences import of_replicas
from moediag.result import Confidence, Verdict

VERDICT = Verdict.REPLICA_DIVERGENCE


def find(facts: Facts) -> Disagreement | None:
    first, wrong = facts.replicas.first, facts.first_wrong
    return first if first is not None and (wrong is None or first.step < wrong) else None


def judge(facts: Facts, found: Disagreement) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        of_replicas(facts.replicas),
        culprits=found.culprits,
        victims=apart(found.ranks, found.culprits),
        pattern=found.what,
        until=found.step,
    )
