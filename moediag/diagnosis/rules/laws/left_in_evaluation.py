"""A watched job went on training a model in evaluation mode."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_loops import LeftInEvaluation
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_loop_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> LeftInEvaluation | None:
    left = facts.loops.left
    return left if left is not None and left.since else None


def judge(facts: Facts, found: LeftInEvaluation) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_left(found),
        pattern="law mode",
        next_step="Call `model.train()` after each evaluation.",
    )
