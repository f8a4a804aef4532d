"""Diagnoses one trial: computes facts, applies the first matching rule, writes words and tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moediag.diagnosis.blame import decisions
from moediag.diagnosis.blame.decisions import Parted
from moediag.diagnosis.blame.standings import standings
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector, Judgement
from moediag.diagnosis.laws import LAWS, replica_sets
from moediag.diagnosis.numbers import by_part, expert_holders, ownership
from moediag.diagnosis.rules.order import RULES, judge
from moediag.diagnosis.rules.signature import signature
from moediag.diagnosis.schedules.surplus import ahead
from moediag.diagnosis.words import (
    charts,
    device_sentences,
    divergence_view,
    log_sentences,
    node_sentences,
    schedule_view,
    trial_tables,
    user_facts,
)
from moediag.diagnosis.words.next_step import next_step
from moediag.diagnosis.words.paths import path_lines
from moediag.diagnosis.words.places import places
from moediag.evidence.model import Evidence
from moediag.result import FAILURES, Confidence, Diagnosis, Table, Verdict
from moediag.result.wording import ranks


def diagnose(evidence: Evidence, rules: Iterable[Detector] = RULES) -> Diagnosis:
    """What ``evidence`` shows, by the first of ``rules`` that finds something.

    Pure and near linear in the number of recorded events."""
    facts = Facts(evidence)
    verdict, judged = judge(facts, rules)
    judged = _by_thread(facts, verdict, judged)
    numbers = facts.gradients
    by_schedule = facts.divergence if judged.divergence else None
    why, told = _why(facts, verdict, judged)
    standing = facts.standings
    schedules = (
        schedule_view.side_by_side(by_schedule, facts.aligned, judged.culprits, evidence)
        if by_schedule is not None
        else None
    )
    failed = verdict in FAILURES
    forked = facts.fork if by_schedule is not None and failed else None
    if judged.failure is not None:
        standing = standings(evidence, None, facts.own)
    return Diagnosis(
        verdict=verdict,
        signature=signature(
            verdict,
            by_schedule,
            facts.blame,
            judged.failure,
            judged.culprits,
            judged.pattern,
            why[0].what if why else "",
        ),
        confidence=judged.confidence,
        culprits=judged.culprits,
        victims=judged.victims,
        cause=f"{judged.cause}{node_sentences.where(evidence, judged.culprits)} {told}".rstrip(),
        first_divergence=(
            divergence_view.first_divergence(by_schedule, facts.blame)
            if by_schedule is not None
            else None
        ),
        gradient_error=numbers.error,
        worst_parameter=numbers.worst,
        wrong_parameters=numbers.wrong if judged.gradients else (),
        parameters_compared=numbers.compared,
        not_seen=(*not_seen(evidence, facts.aligned.not_seen), *replica_sets.not_checked(facts)),
        stacks=divergence_view.stacks(evidence),
        suspicious=tuple(text for law in LAWS for text in law.suspicious(facts)),
        notes=(
            *judged.notes,
            *(note for law in LAWS for note in law.notes(facts)),
            *_at_end(facts, verdict, judged),
            *_worker_notes(evidence),
            *node_sentences.note(evidence),
            *log_sentences.notes(evidence, judged.cause),
            *log_sentences.threads(evidence),
        ),
        tables=_tables(facts),
        schedules=schedules,
        states=schedule_view.states(evidence, facts.failed),
        places=judged.places or places(standing, judged.culprits),
        paths=path_lines(forked, standing, evidence),
        next_step=judged.next_step
        or next_step(
            evidence, verdict, by_schedule, judged.failure, judged.culprits, standing, forked
        ),
        attached=evidence.attached,
        tokens=(
            charts.tokens(evidence, facts.blame, _step(facts), judged.culprits) if failed else None
        ),
        layer_errors=charts.layer_errors(evidence, facts.compared_step) if failed else (),
        timeline=charts.timeline(by_schedule, schedules, evidence),
    )


def _by_thread(facts: Facts, verdict: Verdict, judged: Judgement) -> Judgement:
    """``judged``, with the rank that just lost a thread by an exception, if it names no other."""
    found = user_facts.ended_thread(facts.evidence)
    stands = verdict in (Verdict.HANG, Verdict.COLLECTIVE_MISMATCH)
    if not stands or found is None or judged.culprits not in ((), (found[0],)):
        return judged
    fixed = replace(judged, next_step=user_facts.fix(*found))
    if judged.culprits:
        return fixed
    victims = tuple(rank for rank in facts.evidence.ranks if rank != found[0])
    return replace(fixed, confidence=Confidence.LOW, culprits=found[:1], victims=victims)


def _step(facts: Facts) -> int | None:
    """The step of the failure, from 1, as far as calls or gradients show it."""
    here = facts.divergence.calls.values() if facts.divergence is not None else ()
    return min((c.step for c in here if c is not None), default=facts.compared_step)


def broken_law(evidence: Evidence) -> str:
    """The sentence about a law that a running job has broken, or "". Only what later steps cannot
    take back: an equal learning rate may follow, and so may a first gradient."""
    facts = Facts(evidence)
    broken = (law.broken(facts) for law in LAWS)
    return next((one.cause for one in broken if one is not None and one.lasting), "")


def _why(facts: Facts, verdict: Verdict, judged: Judgement) -> tuple[tuple[Parted, ...], str]:
    """The differing decisions of ranks before the failure, and the sentence about them."""
    if verdict not in FAILURES:
        return (), ""
    by_schedule = facts.divergence if judged.divergence else None
    why = decisions.before(facts.decisions, facts.evidence, by_schedule, judged.until)
    told = decisions.sentence(why, by_schedule is not None, judged.until)
    mixed = ahead(facts.aligned, facts.evidence)
    if mixed is not None:
        told = f"{told} {mixed.sentence}"
    # A dump's calls are those of the device: where victims stand is in the table.
    if verdict == Verdict.HANG and not (facts.evidence.foreign and judged.culprits):
        told = f"{told} {device_sentences.sentence(facts.fronts)}"
    if verdict in (Verdict.HANG, Verdict.COLLECTIVE_MISMATCH):
        told = f"{told} {user_facts.sentences(facts.evidence)}"
    return why, told.strip()


def _at_end(facts: Facts, verdict: Verdict, judged: Judgement) -> tuple[str, ...]:
    """What else is wrong, one sentence each."""
    told: tuple[str, ...] = ()
    if facts.ownership.wrong and verdict != Verdict.WRONG_WEIGHTS:
        told = (facts.ownership.text,)
    if facts.resume.verdict is not None and judged.cause != facts.resume.text:
        told = (*told, facts.resume.text)
    broken = [one for law in LAWS if (one := law.broken(facts)) is not None and one.beside]
    return (*told, *(one.cause for one in broken if one.cause != judged.cause))


def _tables(facts: Facts) -> tuple[Table, ...]:
    evidence, numbers, step = facts.evidence, facts.gradients, facts.compared_step
    of_detectors = trial_tables.table(trial_tables.seen(evidence, numbers, facts.replicas))
    of_parts = None  # the detectors' table has the same in one row
    if of_detectors is None and step is not None and facts.parts:
        of_parts = by_part.table(facts.parts, step)
    tables = (
        *expert_holders.tables(evidence, facts.ownership.pattern in ownership.LOST),
        of_detectors,
        of_parts,
        facts.factors.table,
        *facts.resume.tables,
        facts.metrics.table,
        device_sentences.table(facts.fronts) if evidence.stall is not None else None,
        decisions.table(facts.decisions),
        trial_tables.looked(evidence),
        *trial_tables.tables(evidence),
    )
    return tuple(table for table in tables if table is not None)


def not_seen(evidence: Evidence, of_alignment: tuple[str, ...]) -> tuple[str, ...]:
    """What the launcher, the ranks and the alignment did not see, each text once. A text that all
    ranks report appears without a rank."""
    merged: dict[str, list[int]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        for text in seen.not_seen:
            merged.setdefault(text, []).append(rank)
    of_ranks = [
        text
        if len(who) == len(evidence.ranks) or text.startswith("rank ")
        else f"{ranks(who)}: {text}"
        for text, who in merged.items()
    ]
    return tuple(dict.fromkeys((*evidence.not_seen, *of_ranks, *of_alignment)))


def _worker_notes(evidence: Evidence) -> tuple[str, ...]:
    early = (note for seen in evidence.ranks.values() for note in seen.notes)
    late = (note for seen in evidence.ranks.values() if seen.outcome for note in seen.outcome.notes)
    return tuple(dict.fromkeys((*early, *late)))
