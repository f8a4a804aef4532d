"""Ranks wait in a collective after their schedules diverged."""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, how_sure, victims
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words import cause, foreign_jobs
from moediag.result import Verdict

VERDICT = Verdict.HANG


def find(facts: Facts) -> Divergence | None:
    return facts.divergence if facts.evidence.stall is not None else None


def judge(facts: Facts, found: Divergence) -> Judgement:
    evidence, culprits = facts.evidence, facts.blame.culprits
    text = cause.of_divergence(found, facts.blame, evidence.backend, died=False)
    if found.silent:
        text += cause.out_of_step(evidence, facts.waiting)
    text += cause.called_at(found, facts.blame, evidence, text)
    if found.kind == "missing":
        text = f"{text} {whereabouts(evidence, culprits)}".rstrip()
    if evidence.foreign and not culprits:
        text += foreign_jobs.to_collect(evidence)
    return Judgement(
        how_sure(facts),
        text,
        culprits=culprits,
        victims=victims(facts),
        divergence=True,
    )
