"""From evidence to a diagnosis: every fact is found out first, then judged, then written down."""

from __future__ import annotations

from moediag.diagnosis import (
    applied,
    around,
    decisions,
    detectors,
    held,
    ownership,
    parts,
    programs,
    shown,
)
from moediag.diagnosis.ahead import ahead
from moediag.diagnosis.align import align
from moediag.diagnosis.applied import applied_facts
from moediag.diagnosis.culprits import Blame, blame
from moediag.diagnosis.diverge import first_divergence
from moediag.diagnosis.factor import factor_facts
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.failures import failures
from moediag.diagnosis.frontier import frontier
from moediag.diagnosis.gradients import gradient_facts
from moediag.diagnosis.habit import departed
from moediag.diagnosis.loads import load_facts, load_tables
from moediag.diagnosis.metrics import metric_facts
from moediag.diagnosis.model import Diagnosis
from moediag.diagnosis.order import replay
from moediag.diagnosis.ownership import ownership_facts
from moediag.diagnosis.replicas import replica_facts
from moediag.diagnosis.resume import resume_facts
from moediag.diagnosis.signature import signature
from moediag.diagnosis.starvation import tokens_of
from moediag.diagnosis.verdict import judge
from moediag.evidence.model import Evidence
from moediag.report.names import ranks
from moediag.verdicts import Verdict

_UNEXPLAINED = (Verdict.CLEAN, Verdict.NOT_APPLICABLE, Verdict.INCONCLUSIVE)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Pure and near linear in the number of recorded events."""
    aligned = align(evidence)
    failed = failures(evidence)
    divergence = first_divergence(aligned, replay(aligned, evidence), evidence, failed)
    found = Blame()
    if divergence is not None:
        schedule = aligned.schedules.get((divergence.group.name, divergence.group.ranks))
        found = blame(divergence, schedule, tokens_of(evidence))
        if evidence.foreign and not found.culprits:
            odd = departed(divergence.calls, evidence)
            found = Blame(odd, "habit") if odd else found
    owned, numbers = ownership_facts(evidence), gradient_facts(evidence)
    step = numbers.step or parts.wrong_inputs(evidence)
    by_part = parts.parts(evidence, step) if step is not None else ()
    replicas, loads = replica_facts(evidence), load_facts(evidence)
    resumed, factors = resume_facts(evidence), factor_facts(evidence, step)
    after, reported = applied_facts(evidence), metric_facts(evidence)
    stuck = None
    if evidence.foreign and evidence.stall is not None and divergence is None:
        stuck = frontier(aligned, evidence)
    facts = Facts(
        evidence,
        failed,
        divergence,
        found,
        numbers,
        parts=by_part,
        ownership=owned,
        replicas=replicas,
        loads=loads,
        resume=resumed,
        frontier=stuck,
        factors=factors,
        applied=after,
        metrics=reported,
    )
    judged = judge(facts)
    parted = decisions.parted(evidence)
    by_schedule = divergence if judged.divergence else None
    last = {
        Verdict.REPLICA_DIVERGENCE: replicas.first.step if replicas.first is not None else None,
        Verdict.WRONG_WEIGHTS: after.step,
        Verdict.WRONG_METRICS: reported.step,
    }.get(judged.verdict, numbers.step)
    why = (
        decisions.before(parted, evidence, by_schedule, last)
        if judged.verdict not in _UNEXPLAINED
        else ()
    )
    told = decisions.sentence(why, by_schedule is not None, last)
    mixed = ahead(aligned, evidence) if judged.verdict not in _UNEXPLAINED else None
    told = f"{told} {mixed.sentence}" if mixed is not None else told
    at_end: tuple[str, ...] = ()
    if owned.wrong and judged.verdict != Verdict.WRONG_WEIGHTS:
        at_end = (owned.text,)
    if resumed.verdict is not None and judged.cause != resumed.text:
        at_end = (*at_end, resumed.text)
    of_detectors = detectors.table(detectors.seen(evidence, numbers, replicas))
    of_parts = None  # the detectors' table says the same in one row
    if of_detectors is None and step is not None and by_part:
        of_parts = parts.table(by_part, step)
    tables = (
        *held.tables(evidence, owned.pattern in ownership.LOST),
        of_detectors,
        of_parts,
        factors.table,
        *load_tables(loads.loads),
        *resumed.tables,
        reported.table,
        decisions.table(parted),
        *programs.tables(evidence),
    )
    # After an update that was none, gradients are wrong as well: a consequence.
    wrong = judged.verdict in (Verdict.WRONG_GRADIENTS, Verdict.WRONG_WEIGHTS)
    wrong = wrong and judged.what not in applied.NAMES
    return Diagnosis(
        verdict=judged.verdict,
        signature=signature(
            judged.verdict,
            by_schedule,
            found,
            judged.failure,
            judged.culprits,
            judged.what or (owned.pattern if judged.verdict == Verdict.WRONG_WEIGHTS else ""),
            why[0].what if why else "",
        ),
        confidence=judged.confidence,
        culprits=judged.culprits,
        victims=judged.victims,
        cause=f"{judged.cause} {told}".rstrip(),
        first_divergence=(
            shown.first_divergence(by_schedule, found) if by_schedule is not None else None
        ),
        gradient_error=numbers.error,
        worst_parameter=numbers.worst,
        wrong_parameters=numbers.wrong if wrong else (),
        parameters_compared=numbers.compared,
        not_seen=not_seen(evidence, aligned.not_seen),
        stacks=shown.stacks(evidence),
        notes=judged.notes + at_end + _worker_notes(evidence),
        tables=tuple(table for table in tables if table is not None),
        backend=evidence.backend,
        schedules=(
            around.side_by_side(by_schedule, aligned, judged.culprits, evidence)
            if by_schedule is not None
            else None
        ),
        states=around.states(evidence, failed),
    )


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
