"""Ranks wait in a collective after their schedules diverged."""

from __future__ import annotations

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, how_sure, victims
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words import cause, foreign_jobs
from moediag.result import Verdict
from moediag.result.wording import plural

VERDICT = Verdict.HANG
_MOST = 3  # divergences that are described


def find(facts: Facts) -> Divergence | None:
    return None if facts.evidence.stall is None or facts.under_way else facts.divergence


def judge(facts: Facts, found: Divergence) -> Judgement:
    evidence, stall = facts.evidence, facts.evidence.stall
    certain = stall is not None and stall.certain
    stuck = facts.stuck if evidence.foreign and certain else None
    involved = {rank for one, _ in facts.diverging for rank in one.calls}
    lagging: tuple[int, ...] = ()
    if stuck is not None and stuck.basis == "device" and not involved & {*stuck.suspects}:
        lagging = stuck.suspects
    culprits = tuple(sorted({*facts.diverged, *lagging}))
    pairs = facts.diverging
    text = " Independently: ".join(_told(facts, one, blame) for one, blame in pairs[:_MOST])
    if len(pairs) > _MOST:
        text += f" And {plural(len(pairs) - _MOST, 'more independent divergence')}."
    if lagging and stuck is not None:
        text += f" Independently: {foreign_jobs.of_frontier(stuck, evidence)}"
    step = ""
    if evidence.foreign and (found.kind == "missing" or not culprits):
        step = foreign_jobs.next_step(evidence, culprits)
    if not certain and found.kind == "missing":
        text += foreign_jobs.may_be_late(culprits or found.absent)
        step = f"{foreign_jobs.DUMP_AGAIN} {step}".rstrip()
    return Judgement(
        how_sure(facts),
        text,
        culprits=culprits,
        victims=tuple(rank for rank in victims(facts) if rank not in culprits),
        divergence=True,
        next_step=step,
    )


def _told(facts: Facts, found: Divergence, blame: Blame) -> str:
    evidence = facts.evidence
    text = cause.of_divergence(found, blame, evidence.backend, died=False)
    if found.silent:
        text += cause.out_of_step(evidence, facts.waiting)
    text += cause.called_at(found, blame, evidence, text)
    if found.kind == "missing" and not found.surplus:
        text = f"{text} {whereabouts(evidence, blame.culprits)}".rstrip()
    return text
