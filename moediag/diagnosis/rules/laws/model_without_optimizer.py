"""No optimizer of a watched job has the parameters that get gradients."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_loops import Untrained
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_loop_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_WEIGHTS


def find(facts: Facts) -> Untrained | None:
    found = facts.loops.untrained
    return found if found is not None and found.names else None


def judge(facts: Facts, found: Untrained) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_untrained(found),
        pattern="law untrained",
        next_step="Make the optimizer from the parameters of the model that is trained, after it "
        "was wrapped, moved or replaced.",
    )
