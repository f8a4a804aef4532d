"""Judgements of ranks that stood still."""

from __future__ import annotations

from moediag.diagnosis.blame import nodes
from moediag.diagnosis.blame.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import (
    Facts,
    Judgement,
    any_calls,
    how_sure,
    others,
    undecided,
    unrecorded,
)
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words import cause, foreign_jobs
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks


def hang(facts: Facts) -> Judgement:
    evidence, divergence = facts.evidence, facts.divergence
    assert evidence.stall is not None
    waiting, elsewhere = evidence.stall.waiting, evidence.stall.elsewhere
    gone = nodes.ranks_of(nodes.silent(evidence))
    waiting = tuple(rank for rank in waiting if rank not in gone)
    elsewhere = tuple(rank for rank in elsewhere if rank not in gone)
    if not waiting:
        return undecided(
            f"{ranks(elsewhere).capitalize()} stood still, but not in a collective: no hang of "
            "communication."
        )
    if divergence is not None:
        text = cause.of_divergence(divergence, facts.blame, evidence.backend, died=False)
        if divergence.silent:
            text += cause.out_of_step(evidence, waiting)
        text += cause.called_at(divergence, facts.blame, evidence, text)
        culprits = facts.blame.culprits
        if divergence.kind == "missing":
            text = f"{text} {whereabouts(evidence, culprits)}".rstrip()
        if evidence.foreign and not culprits:
            text += foreign_jobs.to_collect(evidence)
        return Judgement(
            Verdict.HANG,
            how_sure(facts),
            text,
            culprits=culprits,
            victims=others(facts),
            divergence=True,
        )
    if facts.frontier is not None:
        return _standing(facts, facts.frontier)
    if gone and not elsewhere:
        return nodes.stood(facts, waiting)
    few = not evidence.foreign or (len(elsewhere) < len(waiting) and not any_calls(evidence))
    if elsewhere and few:
        return Judgement(
            Verdict.HANG,
            Confidence.MEDIUM,
            f"{ranks(elsewhere).capitalize()} stood still outside any collective while "
            f"{ranks(waiting)} waited. {whereabouts(evidence, elsewhere)}".rstrip(),
            culprits=tuple(sorted(elsewhere)),
            victims=tuple(sorted(waiting)),
        )
    seen = any(evidence.ranks[r].collectives for r in waiting if r in evidence.ranks)
    lost = unrecorded(evidence)
    text = f"{ranks(waiting).capitalize()} waited in a collective. "
    if seen and not lost:
        text += (
            "The schedules agree as far as they were recorded: no rank is at fault, the operation "
            "itself did not complete (network, backend, or a call that the recorder cannot see)."
        )
    else:
        whose = f" of {ranks(lost)}" if seen else ""
        text += f"No schedule{whose} was recorded, so nothing tells which rank is at fault."
    confidence = Confidence.MEDIUM if seen and not lost else Confidence.LOW
    return Judgement(Verdict.HANG, confidence, text, victims=tuple(sorted(waiting)))


def _standing(facts: Facts, found: Frontier) -> Judgement:
    """The schedules agree as far as they were seen."""
    text, evidence = foreign_jobs.of_frontier(found, facts.evidence), facts.evidence
    if evidence.foreign and (found.basis != "device" or not found.suspects):
        text += foreign_jobs.to_collect(evidence)
    strong = found.basis in ("device", "unseen", "none") and found.call is not None
    return Judgement(
        Verdict.HANG,
        Confidence.MEDIUM if strong else Confidence.LOW,
        text,
        culprits=found.suspects,
        victims=tuple(sorted(set(evidence.ranks) - set(found.suspects))) if found.suspects else (),
        what="stuck",
    )
