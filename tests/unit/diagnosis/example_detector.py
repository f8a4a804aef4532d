"""The detector of docs/extending/add-a-detector.md."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, detector
from moediag.result import Confidence, Verdict

_ENOUGH = 3  # steps: two equal losses may be chance in bf16


@detector(Verdict.WRONG_WEIGHTS)
def frozen_loss(facts: Facts) -> Judgement | None:
    """The loss is exactly the same in every step on every rank: training changes nothing."""
    losses = [outcome.losses for outcome in facts.outcomes]
    if not losses or len(losses) < facts.evidence.world_size:
        return None  # the rank without numbers may be the one that learned
    if not all(len(own) >= _ENOUGH and len(set(own)) == 1 for own in losses):
        return None
    first = losses[0]
    return Judgement(
        Confidence.HIGH,
        f"The loss is exactly {first[0]:g} in all {len(first)} steps: training changes nothing.",
        pattern="frozen loss",
    )
