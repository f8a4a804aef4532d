"""The gradients of a watched job were never cleared between two updates."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_loops import Kept
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_loop_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> Kept | None:
    return facts.loops.kept


def judge(facts: Facts, found: Kept) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_kept(found),
        pattern="law kept",
        next_step="Call `optimizer.zero_grad()` once for each update, before the backward.",
    )
