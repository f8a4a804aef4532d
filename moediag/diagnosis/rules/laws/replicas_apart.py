"""Values that a watched job must keep equal on several ranks differ: parameters of replicas, or
numbers of their optimizer."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_breaches import Breach
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.REPLICA_DIVERGENCE


def find(facts: Facts) -> Breach | None:
    return facts.laws.breach


def judge(facts: Facts, found: Breach) -> Judgement:
    first = found.reason.what if found.reason is not None else "weights"
    return Judgement(
        Confidence.HIGH,
        law_sentences.of_breach(found),
        culprits=found.odd,
        next_step=law_sentences.next_step(found),
        pattern=f"law {'initial weights' if found.initial else first}",
    )
