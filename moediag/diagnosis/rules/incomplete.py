"""Detectors of trials that did not run far enough to be judged."""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, detector, undecided
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.words import cause, leaving, meeting
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, ranks


@detector(Verdict.INCONCLUSIVE)
def interrupted(facts: Facts) -> Judgement | None:
    """The run was interrupted: by a person, or by a scheduler's signal.

    A wait that had not lasted long enough to be called a hang is described, but names no rank.
    An exception that ended a rank before the interruption decides instead.
    """
    evidence = facts.evidence
    if not evidence.interrupted or any(f.message and f.rank in evidence.deaths for f in facts.own):
        return None
    text = "The run was interrupted before it ended."
    if evidence.stall is None:
        stopped = [rank for rank, seen in sorted(evidence.ranks.items()) if seen.os_state == "T"]
        return Judgement(Confidence.LOW, f"{text} {whereabouts(evidence, stopped)}".rstrip())
    text += f" By then no rank had made progress for {evidence.stall.window:.0f} s. "
    late = meeting.late(evidence, facts.waiting, facts.elsewhere)
    if facts.divergence is not None:
        text += cause.of_divergence(facts.divergence, facts.blame, evidence.backend, died=False)
    elif unended := leaving.unended(evidence):
        text += leaving.sentences(evidence, unended)
    elif late:
        text += meeting.of_late(facts.waiting, late)
    else:
        text += f"{ranks(facts.waiting).capitalize()} waited in a collective."
    if facts.waiting:
        text += f" {whereabouts(evidence, facts.elsewhere)}".rstrip()
    text += " It is not known whether the job would have continued."
    return Judgement(Confidence.LOW, text, divergence=facts.divergence is not None)


@detector(Verdict.NOT_APPLICABLE)
def not_applicable(facts: Facts) -> Judgement | None:
    """A worker reports why this trial cannot run on this stack."""
    reasons = dict.fromkeys(o.applicable for o in facts.outcomes if o.applicable)
    return Judgement(Confidence.HIGH, "; ".join(reasons)) if reasons else None


@detector(Verdict.INCONCLUSIVE)
def not_started(facts: Facts) -> Judgement | None:
    """The launcher reports an error, and no rank recorded anything."""
    error = facts.evidence.launch_error
    if not error or any(map(was_recorded, facts.evidence.ranks.values())):
        return None
    return undecided(f"The ranks did not start: {error}")


@detector(Verdict.INCONCLUSIVE)
def mixed_jobs(facts: Facts) -> Judgement | None:
    """The files are not of one job, so nothing is compared."""
    mixed = facts.evidence.mixed
    return undecided(mixed, "Diagnose the dumps of each job alone.") if mixed else None


@detector(Verdict.INCONCLUSIVE)
def cut_short(facts: Facts) -> Judgement | None:
    """The time limit ended ranks without a detected hang, or the launcher failed."""
    if facts.evidence.timed_out:
        return undecided(
            "The time limit ended the launch, and no rank was seen waiting in a collective without "
            "progress: slow is not hung."
        )
    error = facts.evidence.launch_error
    return undecided(f"The launcher failed: {error}") if error else None


@detector(Verdict.INCONCLUSIVE)
def not_comparable(facts: Facts) -> Judgement | None:
    """A job's measurements cannot be compared with those of one process."""
    found = next((outcome for outcome in facts.outcomes if outcome.incomparable), None)
    if found is None:
        return None
    return Judgement(Confidence.LOW, capital(found.incomparable), next_step=found.next_step)


@detector(Verdict.INCONCLUSIVE)
def no_measurements(facts: Facts) -> Judgement | None:
    """A rank left no measurements and no error that explains why."""
    if facts.gradients.measured:
        return None
    without = [rank for rank, seen in facts.evidence.ranks.items() if seen.outcome is None]
    who = ranks(without).capitalize() if without else "Not every rank"
    return undecided(f"{who} left no measurements, and no error that says why.")
