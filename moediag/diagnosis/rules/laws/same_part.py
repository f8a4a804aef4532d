"""Ranks of a watched job that average their gradients asked a DistributedSampler for the same part
of the samples, and trained on the same ones."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_samples import SharedSamples
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_data_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> SharedSamples | None:
    shared = facts.samples.shared
    return shared if shared is not None and shared.same_part else None


def judge(facts: Facts, found: SharedSamples) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_shared(found),
        pattern="law same part",
        next_step="Give DistributedSampler each rank's own `rank`.",
    )
