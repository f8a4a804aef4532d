"""Schedules agree, and an issued call does not complete on some devices."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart, unseen
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words import foreign_jobs
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "stuck"


def find(facts: Facts) -> Frontier | None:
    return None if facts.under_way else facts.frontier


def _next_step(facts: Facts, found: Frontier) -> str:
    if found.basis == "device" and found.suspects:
        whose = ranks(found.suspects)
        return f"Check the device and the links of {whose}: `nvidia-smi -q`, Xid in the kernel log."
    return foreign_jobs.next_step(facts.evidence) if facts.evidence.foreign else ""


def judge(facts: Facts, found: Frontier) -> Judgement:
    text, evidence = foreign_jobs.of_frontier(found, facts.evidence), facts.evidence
    strong = found.basis in ("device", "none") and found.call is not None
    strong = strong or (found.basis == "unseen" and evidence.world_size == len(evidence.ranks) + 1)
    strong = strong and unseen(evidence) != Confidence.LOW
    return Judgement(
        Confidence.MEDIUM if strong else Confidence.LOW,
        text,
        culprits=found.suspects,
        victims=apart(facts.waiting, found.suspects),
        pattern=SIGNATURE,
        next_step=_next_step(facts, found),
    )
