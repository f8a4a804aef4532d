"""Parameters of a watched job became nan or infinite."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_gradients import NotFinite
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_data_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.NONFINITE


def find(facts: Facts) -> NotFinite | None:
    return facts.training.not_finite


def judge(facts: Facts, found: NotFinite) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_not_finite(found),
        pattern="law parameters",
        next_step="Run again with `--laws-every 1` to see which gradient is the first one.",
    )
