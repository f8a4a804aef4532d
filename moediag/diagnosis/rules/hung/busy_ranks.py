"""Some ranks wait in a collective while others are outside any: the others are named.

For evidence of other tools this counts only if they are the minority and no calls were recorded:
recorded calls show which rank waits for which.
"""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG


def find(facts: Facts) -> tuple[int, ...] | None:
    evidence, elsewhere = facts.evidence, facts.elsewhere
    fewer = len(elsewhere) < len(facts.waiting) and not _any_calls(evidence)
    return (elsewhere or None) if not evidence.foreign or fewer else None


def _any_calls(evidence: Evidence) -> bool:
    return any(seen.collectives for seen in evidence.ranks.values())


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    text = f"{ranks(found).capitalize()} stopped outside any collective while "
    text += f"{ranks(facts.waiting)} waited. {whereabouts(facts.evidence, found)}"
    return Judgement(
        Confidence.MEDIUM,
        text.rstrip(),
        culprits=tuple(sorted(found)),
        victims=tuple(sorted(facts.waiting)),
    )
