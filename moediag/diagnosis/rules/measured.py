"""Detectors of trials in which every rank reached its end and left its numbers."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector, few, how_sure, undecided
from moediag.diagnosis.numbers import by_part, metrics, optimizer_update, scale_factor
from moediag.diagnosis.words import cause
from moediag.diagnosis.words.replica_sentences import of_replicas, of_wrong_norm
from moediag.diagnosis.words.verify_sentences import next_of, not_sent, of_first_wrong, of_otherwise
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, error_size, plural, ranks


@detector(Verdict.WRONG_GRADIENTS)
def repeated_samples(facts: Facts) -> Judgement | None:
    """Ranks that average their gradients trained on the same part of one process's samples."""
    found = next((outcome for outcome in facts.outcomes if outcome.repeats), None)
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        capital(found.repeats),
        next_step=found.next_step,
        pattern="repeated samples",
    )


@detector(Verdict.WRONG_WEIGHTS)
def wrong_ownership(facts: Facts) -> Judgement | None:
    """A rank did not train the checkpoint's weights, or was not sharded as requested.

    No rank is at fault where the library lost experts on all ranks.
    """
    found, numbers = facts.ownership, facts.gradients
    if not found.wrong:
        return None
    text = found.text
    if numbers.wrong:
        text += f" {_which(facts)}"
    elif numbers.compared:
        text += f" {plural(numbers.compared, 'gradient')} still match the reference."
    return Judgement(
        Confidence.HIGH,
        text,
        culprits=few(found.ranks, facts.evidence),
        pattern=found.pattern,
        until=facts.applied.step,
        gradients=True,
    )


def _which(facts: Facts) -> str:
    """Which gradients are wrong, and where in the model."""
    count = cause.of_gradients(facts.gradients) if facts.gradients.wrong else ""
    why, (where, place) = (
        of_otherwise(facts.evidence),
        of_first_wrong(facts.evidence, facts.gradients),
    )
    if place is None and (why or facts.factors.complete):
        where = ""  # that all modules are right adds nothing
    by_place = by_part.sentence(facts.parts), scale_factor.sentences(facts.factors)
    return " ".join(filter(None, (why, where, count, *by_place)))


@detector(Verdict.NONFINITE)
def nonfinite_numbers(facts: Facts) -> Judgement | None:
    """A loss, a gradient or a gradient norm is nan or infinite."""
    found = facts.gradients
    if not found.nonfinite:
        return None
    return Judgement(
        Confidence.HIGH,
        f"On {ranks(found.nonfinite_ranks)} {found.nonfinite}.",
        culprits=few(found.nonfinite_ranks, facts.evidence),
        until=found.step,
    )


@detector(Verdict.RESUME_DRIFT)
def resume_drift(facts: Facts) -> Judgement | None:
    """After a save and a load, training did not continue as in an uninterrupted run."""
    found = facts.resume
    if found.verdict != Verdict.RESUME_DRIFT:
        return None
    return Judgement(
        found.confidence, found.text, pattern=found.pattern, until=facts.gradients.step,
        next_step=found.next_step, notes=found.notes,
    )  # fmt: skip


@detector(Verdict.INCONCLUSIVE)
def resume_undecided(facts: Facts) -> Judgement | None:
    """Two uninterrupted runs already differ, so a resumed run that differs shows nothing."""
    found = facts.resume
    differ = found.verdict == Verdict.INCONCLUSIVE
    judged = Judgement(found.confidence, found.text, next_step=found.next_step, notes=found.notes)
    return judged if differ else None


@detector(Verdict.CLEAN)
def resume_exact(facts: Facts) -> Judgement | None:
    """After a save and a load, training continued exactly as in an uninterrupted run."""
    found = facts.resume
    judged = Judgement(found.confidence, found.text, notes=found.notes)
    return judged if found.verdict == Verdict.CLEAN else None


@detector(Verdict.WRONG_WEIGHTS)
def wrong_update(facts: Facts) -> Judgement | None:
    """The optimizer's weights, learning rate or count of updates differ from a single process's.

    This applies only after a step with correct gradients and equal replicas; otherwise those
    decide.
    """
    found, first, wrong = facts.applied, facts.replicas.first, facts.first_wrong
    if found.step is None or (wrong is not None and wrong <= found.step):
        return None
    if first is not None and first.step <= found.step:
        return None
    text = optimizer_update.sentence(found)
    return Judgement(
        Confidence.HIGH,
        " ".join(filter(None, (text, of_otherwise(facts.evidence)))),
        culprits=() if not_sent(facts.evidence) else few(found.ranks, facts.evidence),
        pattern=found.what,
        until=found.step,
        next_step=next_of(facts.evidence, facts.gradients) or optimizer_update.advice(found),
    )


@detector(Verdict.REPLICA_DIVERGENCE)
def unequal_replicas(facts: Facts) -> Judgement | None:
    """Values that must be equal on several ranks differ, before any gradient was wrong."""
    found, wrong = facts.replicas.first, facts.first_wrong
    if found is None or (wrong is not None and wrong <= found.step):
        return None
    return Judgement(
        Confidence.HIGH,
        of_replicas(facts.replicas),
        culprits=found.culprits,
        victims=apart(found.ranks, found.culprits),
        pattern=found.what,
        until=found.step,
    )


@detector(Verdict.WRONG_GRADIENTS)
def wrong_norm(facts: Facts) -> Judgement | None:
    """The norm used for clipping is equal on every rank and wrong, before any gradient was wrong.

    This makes the gradients wrong too: the optimizer gets them scaled by a wrong factor.
    """
    found, wrong = facts.replicas.wrong_norm, facts.first_wrong
    if found is None or not facts.gradients.compared:
        return None
    if wrong is not None and wrong <= found.step:
        return None
    return Judgement(
        Confidence.HIGH,
        of_wrong_norm(found),
        pattern="clipping norm",
        until=facts.gradients.step,
        gradients=True,
    )


@detector(Verdict.WRONG_GRADIENTS)
def wrong_gradients(facts: Facts) -> Judgement | None:
    """Gradients of parameters, or those that MoE blocks pass down, differ from the reference."""
    if not facts.gradients.wrong and not any(part.wrong for part in facts.parts):
        return None
    text, d, lost = _which(facts), facts.divergence, facts.unrecorded
    culprits = facts.blame.culprits if d is not None else ()
    if d is not None:
        why = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False)
        text = f"{why} {text}"
    elif lost:
        told = of_otherwise(facts.evidence) or of_first_wrong(facts.evidence, facts.gradients)[0]
        if not told:
            text += f" No schedule of {ranks(lost)} was recorded: it is not known which rank is at "
            text += "fault."
    elif facts.replicas.first is not None:
        text += f" {of_replicas(facts.replicas)}"
    else:
        text += " The schedules agree: no rank is at fault, all compute the same wrong result."
    pattern = "replicas differ" if facts.replicas.found else ""
    if facts.factors.complete:
        pattern = scale_factor.PATTERN
    certain = Confidence.MEDIUM if lost else Confidence.HIGH
    return Judgement(
        how_sure(facts) if d is not None else certain,
        text,
        culprits=culprits,
        victims=apart(facts.gradients.ranks, culprits),
        divergence=d is not None,
        pattern=pattern if d is None else "",
        until=facts.gradients.step,
        gradients=True,
        places=tuple(filter(None, of_first_wrong(facts.evidence, facts.gradients)[1:])),
        next_step=next_of(facts.evidence, facts.gradients)
        or next((o.next_step for o in facts.outcomes if o.next_step), ""),
    )


@detector(Verdict.WRONG_METRICS)
def wrong_metrics(facts: Facts) -> Judgement | None:
    """A metric is wrong, and no wrong gradient was found."""
    found = facts.metrics
    if found.step is None:
        return None
    text = metrics.sentence(found)
    if facts.gradients.compared:
        text += " All compared gradients match the single process."
    return Judgement(Confidence.HIGH, text, pattern=found.pattern, until=found.step)


@detector(Verdict.CLEAN)
def right_numbers(facts: Facts) -> Judgement | None:
    """Everything that was compared is correct. Schedules that differ are noted."""
    found, d = facts.gradients, facts.divergence
    if not found.compared:
        return None
    text = f"{plural(found.compared, 'gradient')} match the reference on every rank; largest "
    text += f"error {error_size(found.error)}."
    if facts.ownership.experts:
        text += f" All {facts.ownership.experts} experts of each layer are where they belong."
    if d is None:
        return Judgement(Confidence.HIGH, text)
    why = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False)
    note = f"the schedules differ, although the result is correct: {why}"
    return Judgement(Confidence.MEDIUM, text, notes=(note,))


@detector(Verdict.CLEAN)
def only_timed(facts: Facts) -> Judgement | None:
    """Steps were timed, and nothing was compared."""
    timed = any(outcome.cost for outcome in facts.outcomes)
    return Judgement(Confidence.LOW, "Only timed; nothing was compared.") if timed else None


@detector(Verdict.INCONCLUSIVE)
def nothing_compared(_: Facts) -> Judgement | None:
    """Every rank reached its end, but no gradient was compared with a reference."""
    return undecided("Every rank reached its end, but no gradient was compared with a reference.")
