"""None of the low-rank adapters that an optimizer of a watched job trains ever had a gradient."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_gradients import Starved
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_data_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> Starved | None:
    return facts.training.adapters


def judge(facts: Facts, found: Starved) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        f"{law_data_sentences.of_starved(found)}: these adapters train nothing.",
        pattern="law adapters",
        next_step="Look for what cuts the graph before the adapters: no_grad, detach, or gradient "
        "checkpointing whose inputs do not require gradients.",
    )
