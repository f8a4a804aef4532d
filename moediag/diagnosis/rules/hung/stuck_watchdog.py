"""NCCL's watchdog thread itself stopped in some ranks; nothing shows in which call they wait."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "stuck-watchdog"


def find(facts: Facts) -> tuple[int, ...] | None:
    """The ranks whose heartbeat monitor reports it; empty if the log does not tell which."""
    found = [one for one in facts.evidence.reports if one.kind == "stuck"]
    return tuple(sorted({o.rank for o in found if o.rank is not None})) if found else None


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    whose = ranks(found) if found else "a rank that the log does not name"
    text = (
        f"The watchdog thread of NCCL stopped in {whose}: a call of CUDA or NCCL does not return "
        "there, or another thread holds a lock that it needs. This does not show which rank the "
        "job "
        "waits for, so no rank is named."
    )
    return Judgement(
        Confidence.LOW,
        text,
        pattern=SIGNATURE,
        next_step=foreign_jobs.next_step(facts.evidence),
    )
