"""A watched job clipped gradients that were still multiplied by the loss scale."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_loop_sentences
from moediag.evidence.law_model import ClipNorm
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> ClipNorm | None:
    return facts.loops.scaled


def judge(facts: Facts, found: ClipNorm) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_scaled(found),
        pattern="law scaled",
        next_step="Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
    )
