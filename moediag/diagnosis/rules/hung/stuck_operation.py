"""Schedules agree, and an issued call does not complete on some devices."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words import foreign_jobs
from moediag.result import Confidence, Verdict

VERDICT = Verdict.HANG
SIGNATURE = "stuck"


def find(facts: Facts) -> Frontier | None:
    return facts.frontier


def judge(facts: Facts, found: Frontier) -> Judgement:
    text, evidence = foreign_jobs.of_frontier(found, facts.evidence), facts.evidence
    if evidence.foreign and (found.basis != "device" or not found.suspects):
        text += foreign_jobs.to_collect(evidence)
    strong = found.basis in ("device", "unseen", "none") and found.call is not None
    return Judgement(
        Confidence.MEDIUM if strong else Confidence.LOW,
        text,
        culprits=found.suspects,
        victims=apart(tuple(evidence.ranks), found.suspects),
        pattern=SIGNATURE,
    )
