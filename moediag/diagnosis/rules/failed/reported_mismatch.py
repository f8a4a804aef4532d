"""The communication library reports a mismatch of collectives; no schedule shows which."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import Failure, said
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.COLLECTIVE_MISMATCH


def find(facts: Facts) -> tuple[Failure, ...] | None:
    return tuple(failure for failure in facts.failed if failure.mismatch) or None


def judge(facts: Facts, found: tuple[Failure, ...]) -> Judgement:
    return Judgement(
        Confidence.LOW,
        f"{ranks(f.rank for f in found).capitalize()}: the communication library says that "
        f"collectives did not match ({said(facts.failed)}). No recorded schedule shows which.",
    )
