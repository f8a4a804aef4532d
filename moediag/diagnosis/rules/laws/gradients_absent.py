"""No parameter that an optimizer of a watched job has ever had a gradient."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_loops import Untrained
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_loop_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> Untrained | None:
    found = facts.loops.untrained
    return found if found is not None and not found.names else None


def judge(facts: Facts, found: Untrained) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_absent(found),
        pattern="law absent",
        next_step="Look for what cuts the graph between the model and the loss: no_grad, detach, "
        ".data, or a loss computed from copied values; or for a missing backward.",
    )
