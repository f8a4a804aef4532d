"""Schedules agree, and an issued call does not complete on some devices."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart, unseen
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words import foreign_jobs
from moediag.result import Confidence, Verdict

VERDICT = Verdict.HANG
SIGNATURE = "stuck"


def find(facts: Facts) -> Frontier | None:
    return None if facts.under_way else facts.frontier


def judge(facts: Facts, found: Frontier) -> Judgement:
    text, evidence = foreign_jobs.of_frontier(found, facts.evidence), facts.evidence
    if evidence.foreign and (found.basis != "device" or not found.suspects):
        text += foreign_jobs.to_collect(evidence)
    strong = found.basis in ("device", "none") and found.call is not None
    strong = strong or (found.basis == "unseen" and evidence.world_size == len(evidence.ranks) + 1)
    strong = strong and unseen(evidence) != Confidence.LOW
    return Judgement(
        Confidence.MEDIUM if strong else Confidence.LOW,
        text,
        culprits=found.suspects,
        victims=apart(facts.waiting, found.suspects),
        pattern=SIGNATURE,
    )
