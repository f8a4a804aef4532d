"""Every rank reached its end, but no gradient was compared with a reference."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> bool | None:
    return True


def judge(facts: Facts, found: bool) -> Judgement:
    return undecided("Every rank reached its end, but no gradient was compared with a reference.")
