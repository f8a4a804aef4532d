"""Ranks stopped outside any collective: this is not a communication hang."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> tuple[int, ...] | None:
    return facts.elsewhere if facts.evidence.stall is not None and not facts.waiting else None


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    return undecided(
        f"{ranks(found).capitalize()} stopped, but did not wait in a collective: this is not a "
        "hang of communication."
    )
