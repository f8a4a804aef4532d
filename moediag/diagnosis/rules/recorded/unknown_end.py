"""It is not known how ranks of a watched job ended."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.diagnosis.schedules.align import was_recorded
from moediag.evidence.model import RankEvidence
from moediag.result import Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> list[int] | None:
    if not facts.evidence.watched or facts.evidence.foreign:
        return None
    recorded = [(r, s) for r, s in sorted(facts.evidence.ranks.items()) if was_recorded(s)]
    return [rank for rank, seen in recorded if not _ended_well(seen)] or None


def _ended_well(seen: RankEvidence) -> bool:
    return seen.finished or (seen.exit is not None and seen.exit.code == 0)


def judge(facts: Facts, found: list[int]) -> Judgement:
    return undecided(f"How {ranks(found)} ended is not known.")
