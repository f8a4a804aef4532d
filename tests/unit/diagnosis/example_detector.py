"""The loss is exactly the same in every step on every rank: training changes nothing."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_WEIGHTS
SIGNATURE = "frozen loss"
ENOUGH = 3  # steps: two equal losses may be chance in bf16


def find(facts: Facts) -> list[float] | None:
    """The losses of the steps. None where they differ, are too few, or some rank left none."""
    outcomes = [seen.outcome for seen in facts.evidence.ranks.values()]
    losses = [outcome.losses for outcome in outcomes if outcome is not None]
    if not losses or len(losses) < facts.evidence.world_size:
        return None  # the rank without numbers may be the one that learned
    frozen = all(len(own) >= ENOUGH and len(set(own)) == 1 for own in losses)
    return losses[0] if frozen else None


def judge(facts: Facts, found: list[float]) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        f"The loss is exactly {found[0]:g} in all {len(found)} steps: training changes nothing.",
        pattern=SIGNATURE,
    )
