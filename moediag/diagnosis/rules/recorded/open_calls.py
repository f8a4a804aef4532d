"""Other tools recorded incomplete calls in a job that is not known to hang."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.diagnosis.words import cause, foreign_jobs
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> bool | None:
    calls = (call for seen in facts.evidence.ranks.values() for call in seen.collectives)
    return (facts.evidence.foreign and any(not call.completed for call in calls)) or None


def judge(facts: Facts, found: bool) -> Judgement:
    text = "Some calls had not completed when this was recorded."
    step = foreign_jobs.next_step(facts.evidence)
    stall = facts.evidence.stall
    if stall is not None:
        first, backend = facts.divergence, facts.evidence.backend
        told = cause.of_divergence(first, facts.blame, backend, died=False) if first else ""
        text = foreign_jobs.under_way(facts.stuck, told, stall.at_once)
        step = foreign_jobs.DUMP_AGAIN
    return undecided(text, step)
