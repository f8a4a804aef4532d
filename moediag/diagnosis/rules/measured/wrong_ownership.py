"""A rank did not train the checkpoint's weights, or was not sharded as requested.

No rank is at fault where the library lost experts on all ranks.
"""

from __future__ import annotations

from moediag.diagnosis.numbers.ownership import OwnershipFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, few
from moediag.diagnosis.rules.measured.wrong_gradients import which
from moediag.result import Confidence, Verdict
from moediag.result.wording import plural

VERDICT = Verdict.WRONG_WEIGHTS


def find(facts: Facts) -> OwnershipFacts | None:
    return facts.ownership if facts.ownership.wrong else None


def judge(facts: Facts, found: OwnershipFacts) -> Judgement:
    text, numbers = found.text, facts.gradients
    if numbers.wrong:
        text += f" {which(facts)}"
    elif numbers.compared:
        text += f" {plural(numbers.compared, 'gradient')} still match the reference."
    return Judgement(
        Confidence.HIGH,
        text,
        culprits=few(found.ranks, facts.evidence),
        pattern=found.pattern,
        until=facts.applied.step,
        gradients=True,
    )
