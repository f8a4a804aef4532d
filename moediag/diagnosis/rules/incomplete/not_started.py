"""The launcher reports an error, and no rank recorded anything."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.diagnosis.schedules.align import was_recorded
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> str | None:
    recorded = any(map(was_recorded, facts.evidence.ranks.values()))
    return None if recorded else facts.evidence.launch_error or None


def judge(facts: Facts, found: str) -> Judgement:
    return undecided(f"The ranks did not start: {found}")
