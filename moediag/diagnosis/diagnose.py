"""From evidence to a diagnosis: every fact is found out first, then judged, then written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moediag.diagnosis.blame import decisions, nodes
from moediag.diagnosis.blame.culprits import Blame, blame
from moediag.diagnosis.blame.decisions import Parted
from moediag.diagnosis.blame.failures import failures
from moediag.diagnosis.numbers import by_part, expert_holders, optimizer_update, ownership
from moediag.diagnosis.numbers.gradients import GradientFacts, gradient_facts
from moediag.diagnosis.numbers.metrics import metric_facts
from moediag.diagnosis.numbers.optimizer_update import applied_facts
from moediag.diagnosis.numbers.ownership import ownership_facts
from moediag.diagnosis.numbers.replicas import replica_facts
from moediag.diagnosis.numbers.resume import resume_facts
from moediag.diagnosis.numbers.scale_factor import factor_facts
from moediag.diagnosis.rules.facts import Facts, Judgement
from moediag.diagnosis.rules.signature import signature
from moediag.diagnosis.rules.verdict import judge
from moediag.diagnosis.schedules import device_position
from moediag.diagnosis.schedules.align import Aligned, align
from moediag.diagnosis.schedules.diverge import Divergence, first_divergence
from moediag.diagnosis.schedules.replay import replay
from moediag.diagnosis.schedules.starvation import tokens_of
from moediag.diagnosis.schedules.step_offset import ahead
from moediag.diagnosis.schedules.stuck_calls import frontier
from moediag.diagnosis.schedules.usual_order import departures
from moediag.diagnosis.words import detector_table, divergence_view, program_tables, schedule_view
from moediag.evidence.model import Evidence
from moediag.result import Diagnosis, Table, Verdict
from moediag.result.wording import ranks

_UNEXPLAINED = (Verdict.CLEAN, Verdict.NOT_APPLICABLE, Verdict.INCONCLUSIVE)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Pure and near linear in the number of recorded events."""
    aligned = align(evidence)
    facts = _facts(evidence, aligned)
    judged = judge(facts)
    numbers, owned = facts.gradients, facts.ownership
    by_schedule = facts.divergence if judged.divergence else None
    parted = decisions.parted(evidence)
    why, told = _why(facts, judged, parted, aligned)
    # After an update that was none, gradients are wrong as well: a consequence.
    wrong = judged.verdict in (Verdict.WRONG_GRADIENTS, Verdict.WRONG_WEIGHTS)
    wrong = wrong and judged.what not in optimizer_update.NAMES
    return Diagnosis(
        verdict=judged.verdict,
        signature=signature(
            judged.verdict,
            by_schedule,
            facts.blame,
            judged.failure,
            judged.culprits,
            judged.what or (owned.pattern if judged.verdict == Verdict.WRONG_WEIGHTS else ""),
            why[0].what if why else "",
        ),
        confidence=judged.confidence,
        culprits=judged.culprits,
        victims=judged.victims,
        cause=f"{judged.cause}{nodes.where(evidence, judged.culprits)} {told}".rstrip(),
        first_divergence=(
            divergence_view.first_divergence(by_schedule, facts.blame)
            if by_schedule is not None
            else None
        ),
        gradient_error=numbers.error,
        worst_parameter=numbers.worst,
        wrong_parameters=numbers.wrong if wrong else (),
        parameters_compared=numbers.compared,
        not_seen=not_seen(evidence, aligned.not_seen),
        stacks=divergence_view.stacks(evidence),
        notes=(
            judged.notes + _at_end(facts, judged) + _worker_notes(evidence) + nodes.note(evidence)
        ),
        tables=_tables(facts, parted),
        schedules=(
            schedule_view.side_by_side(by_schedule, aligned, judged.culprits, evidence)
            if by_schedule is not None
            else None
        ),
        states=schedule_view.states(evidence, facts.failed),
        attached=evidence.attached,
    )


def _facts(evidence: Evidence, aligned: Aligned) -> Facts:
    """Everything that a verdict can rest on."""
    failed = failures(evidence)
    divergence = first_divergence(aligned, replay(aligned, evidence), evidence, failed)
    found = Blame()
    if divergence is not None:
        schedule = aligned.schedules.get((divergence.group.name, divergence.group.ranks))
        found = blame(divergence, schedule, tokens_of(evidence))
        if evidence.foreign or evidence.watched:
            found = _by_habit(divergence, found, evidence)
    numbers = gradient_facts(evidence)
    step = _compared_step(evidence, numbers)
    stuck = None
    if evidence.stall is not None and divergence is None and _by_devices(evidence):
        stuck = frontier(aligned, evidence)
    return Facts(
        evidence,
        failed,
        divergence,
        found,
        numbers,
        parts=by_part.parts(evidence, step) if step is not None else (),
        ownership=ownership_facts(evidence),
        replicas=replica_facts(evidence),
        resume=resume_facts(evidence),
        frontier=stuck,
        fronts=device_position.fronts(evidence),
        factors=factor_facts(evidence, step),
        applied=applied_facts(evidence),
        metrics=metric_facts(evidence),
    )


def _by_habit(divergence: Divergence, found: Blame, evidence: Evidence) -> Blame:
    """In a job of somebody else: who departed from the habit where nothing else names anybody;
    and where those who wait in a circle did, which may be long before they came to a stop."""
    if not found.culprits:
        odd = departures(divergence.calls, evidence)
        return Blame(tuple(one.rank for one in odd), "habit", departures=odd) if odd else found
    if divergence.kind != "order":
        return found
    calls = {rank: divergence.calls[rank] for rank in found.culprits}
    return replace(found, departures=departures(calls, evidence, alone=True))


def _by_devices(evidence: Evidence) -> bool:
    """Whether completion tells where it stands still: it does not where a rank is known to be
    somewhere else."""
    if evidence.foreign:
        return True
    return evidence.devices_known and not (evidence.stall and evidence.stall.elsewhere)


def _compared_step(evidence: Evidence, numbers: GradientFacts) -> int | None:
    """The step whose gradients, or else whose blocks' inputs, are shown part by part."""
    return numbers.step or by_part.wrong_inputs(evidence)


def _why(
    facts: Facts, judged: Judgement, parted: Sequence[Parted], aligned: Aligned
) -> tuple[tuple[Parted, ...], str]:
    """The decisions by which ranks parted before it failed, and what the cause says of them."""
    if judged.verdict in _UNEXPLAINED:
        return (), ""
    last = {
        Verdict.REPLICA_DIVERGENCE: facts.replicas.first.step if facts.replicas.first else None,
        Verdict.WRONG_WEIGHTS: facts.applied.step,
        Verdict.WRONG_METRICS: facts.metrics.step,
    }.get(judged.verdict, facts.gradients.step)
    by_schedule = facts.divergence if judged.divergence else None
    why = decisions.before(parted, facts.evidence, by_schedule, last)
    told = decisions.sentence(why, by_schedule is not None, last)
    mixed = ahead(aligned, facts.evidence)
    if mixed is not None:
        told = f"{told} {mixed.sentence}"
    if judged.verdict == Verdict.HANG:
        told = f"{told} {device_position.sentence(facts.fronts)}"
    return why, told.strip()


def _at_end(facts: Facts, judged: Judgement) -> tuple[str, ...]:
    """What is wrong besides, in a sentence each."""
    told: tuple[str, ...] = ()
    if facts.ownership.wrong and judged.verdict != Verdict.WRONG_WEIGHTS:
        told = (facts.ownership.text,)
    if facts.resume.verdict is not None and judged.cause != facts.resume.text:
        told = (*told, facts.resume.text)
    return told


def _tables(facts: Facts, parted: Sequence[Parted]) -> tuple[Table, ...]:
    evidence, numbers = facts.evidence, facts.gradients
    of_detectors = detector_table.table(detector_table.seen(evidence, numbers, facts.replicas))
    of_parts = None  # the detectors' table says the same in one row
    step = _compared_step(evidence, numbers)
    if of_detectors is None and step is not None and facts.parts:
        of_parts = by_part.table(facts.parts, step)
    tables = (
        *expert_holders.tables(evidence, facts.ownership.pattern in ownership.LOST),
        of_detectors,
        of_parts,
        facts.factors.table,
        *facts.resume.tables,
        facts.metrics.table,
        device_position.table(facts.fronts) if evidence.stall is not None else None,
        decisions.table(parted),
        *program_tables.tables(evidence),
    )
    return tuple(table for table in tables if table is not None)


def not_seen(evidence: Evidence, of_alignment: tuple[str, ...]) -> tuple[str, ...]:
    """The launcher's, each rank's and the alignment's, once each. What all ranks say alike is
    said once, without a rank."""
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
