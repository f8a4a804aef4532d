"""The time limit ended ranks without a detected hang, or the launcher failed."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> str | None:
    """What ended the trial early, as a sentence."""
    if facts.evidence.timed_out:
        return (
            "The time limit ended the launch, and no rank was seen waiting in a collective without "
            "progress: slow is not hung."
        )
    error = facts.evidence.launch_error
    return f"The launcher failed: {error}" if error else None


def judge(facts: Facts, found: str) -> Judgement:
    return undecided(found)
