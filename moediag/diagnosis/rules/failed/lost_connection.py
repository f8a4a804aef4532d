"""Ranks lost the connection to a peer, and the evidence does not show why."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import Failure, said
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.CRASH


def find(facts: Facts) -> tuple[Failure, ...] | None:
    return facts.failed or None


def judge(facts: Facts, found: tuple[Failure, ...]) -> Judgement:
    return Judgement(
        Confidence.LOW,
        f"{ranks(f.rank for f in found).capitalize()} lost the connection to a peer "
        f"({said(found)}); the evidence shows neither why nor which rank is at fault.",
        failure=found[0],
    )
