"""Ranks of a watched job clipped their FSDP1 shards of the same gradients by different norms."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_gradients import LocalNorms
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_data_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> LocalNorms | None:
    return facts.training.local_norms


def judge(facts: Facts, found: LocalNorms) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_norms(found),
        pattern="law local norms",
        next_step="Call clip_grad_norm_ of the FSDP module: it sums over all shards.",
    )
