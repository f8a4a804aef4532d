"""Judgements of ranks that reached their end: what they computed, or how they ended."""

from __future__ import annotations

from moediag.diagnosis.numbers import metrics, optimizer_update
from moediag.diagnosis.numbers.by_part import sentence
from moediag.diagnosis.numbers.scale_factor import PATTERN, sentences
from moediag.diagnosis.rules.facts import Facts, Judgement, few, how_sure, undecided, unrecorded
from moediag.diagnosis.rules.failed import mismatch
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.words import cause, foreign_jobs, replica_sentences
from moediag.evidence.model import RankEvidence
from moediag.result import Confidence, Verdict
from moediag.result.wording import error_size, plural, ranks


def foreign(facts: Facts) -> Judgement:
    """A job of somebody else that is not known to stand still, and of which nothing failed."""
    evidence, divergence = facts.evidence, facts.divergence
    if divergence is not None and divergence.kind != "missing":
        return mismatch(facts)
    calls = [call for seen in evidence.ranks.values() for call in seen.collectives]
    if not calls:
        return undecided(
            "Nothing that was found shows a failure, and no schedule shows that there is none."
            + foreign_jobs.to_collect(evidence)
        )
    if any(not call.completed for call in calls):
        return undecided("Calls were on their way when this was recorded.")
    text, whole = foreign_jobs.of_records(evidence)
    return Judgement(Verdict.CLEAN, Confidence.MEDIUM if whole else Confidence.LOW, text)


def watched(facts: Facts) -> Judgement:
    """A job that ended by itself, and none of whose ranks failed. What it computed is not known."""
    evidence, divergence = facts.evidence, facts.divergence
    if divergence is not None and divergence.kind != "missing":
        return mismatch(facts)
    recorded = [rank for rank, seen in sorted(evidence.ranks.items()) if was_recorded(seen)]
    if not recorded:
        return undecided("No rank was recorded, so nothing is known of this job.")
    lost = [r for r in recorded if not _ended_well(evidence.ranks[r])]
    if lost:
        return undecided(f"How {ranks(lost)} ended is not known.")
    steps = max(evidence.ranks[rank].last_step for rank in recorded)
    text = f"{ranks(recorded).capitalize()} ended in peace after {plural(steps, 'step')}, never "
    text += "stood still, and their schedules agree as far as they are kept. Nothing was measured."
    unknown = unrecorded(evidence)
    if unknown:
        text += f" Of {ranks(unknown)} nothing was recorded."
    return Judgement(Verdict.CLEAN, Confidence.MEDIUM if unknown else Confidence.HIGH, text)


def _ended_well(seen: RankEvidence) -> bool:
    return seen.finished or (seen.exit is not None and seen.exit.code == 0)


def unmeasured(facts: Facts) -> Judgement:
    silent = [r for r, seen in sorted(facts.evidence.ranks.items()) if seen.outcome is None]
    who = ranks(silent).capitalize() if silent else "Not every rank"
    return undecided(f"{who} left no measurements, and no error that says why.")


def measured(facts: Facts) -> Judgement:
    numbers, divergence = facts.gradients, facts.divergence
    blamed = facts.blame
    if facts.ownership.wrong:
        return _wrong_weights(facts)
    if numbers.nonfinite:
        name = numbers.nonfinite
        return Judgement(
            Verdict.NONFINITE,
            Confidence.HIGH,
            f"On {ranks(numbers.nonfinite_ranks)} {name}.",
            culprits=few(numbers.nonfinite_ranks, facts.evidence),
        )
    resumed = facts.resume
    if resumed.verdict is not None:
        return Judgement(resumed.verdict, resumed.confidence, resumed.text, what=resumed.pattern)
    earlier = _applied(facts) or _replicas(facts)
    if earlier is not None:
        return earlier
    if numbers.wrong or any(part.wrong for part in facts.parts):
        text = _gradients(facts)
        culprits: tuple[int, ...] = ()
        lost = unrecorded(facts.evidence)
        if divergence is not None:
            why = cause.of_divergence(divergence, blamed, facts.evidence.backend, died=False)
            text, culprits = f"{why} {text}", blamed.culprits
        elif lost:
            text += f" No schedule of {ranks(lost)} was recorded: whether a rank is at fault is not"
            text += " known."
        elif facts.replicas.first is not None:
            text += f" {replica_sentences.of_replicas(facts.replicas)}"
        else:
            text += " The schedules agree: no rank is at fault, all compute the same wrong thing."
        certain = Confidence.MEDIUM if lost else Confidence.HIGH
        return Judgement(
            Verdict.WRONG_GRADIENTS,
            how_sure(facts) if divergence is not None else certain,
            text,
            culprits=culprits,
            victims=tuple(sorted(set(numbers.ranks) - set(culprits))) if culprits else (),
            divergence=divergence is not None,
            what=_what(facts) if divergence is None else "",
        )
    if facts.metrics.step is not None:
        text = metrics.sentence(facts.metrics)
        pattern = facts.metrics.pattern
        return Judgement(Verdict.WRONG_METRICS, Confidence.HIGH, text, what=pattern)
    notes: tuple[str, ...] = ()
    if divergence is not None:
        why = cause.of_divergence(divergence, blamed, facts.evidence.backend, died=False)
        notes = (f"the schedules differ, although the result is right: {why}",)
    if numbers.compared:
        text = f"{plural(numbers.compared, 'gradient')} as in the reference on every rank, largest "
        text += f"error {error_size(numbers.error)}."
        if facts.ownership.seen:
            text += f" {facts.ownership.experts} experts of each layer where they belong."
        confidence = Confidence.MEDIUM if divergence is not None else Confidence.HIGH
        return Judgement(Verdict.CLEAN, confidence, text, notes=notes)
    if any(
        seen.outcome is not None and seen.outcome.cost for seen in facts.evidence.ranks.values()
    ):
        return Judgement(Verdict.CLEAN, Confidence.LOW, "Only timed; nothing was compared.")
    return undecided("Every rank reached its end, but no gradient was compared with a reference.")


def _gradients(facts: Facts) -> str:
    """Which are wrong, and where in the model."""
    count = cause.of_gradients(facts.gradients) if facts.gradients.wrong else ""
    return " ".join(filter(None, (count, sentence(facts.parts), sentences(facts.factors))))


def _what(facts: Facts) -> str:
    """The word for wrong gradients that no divergence of schedules explains."""
    if facts.factors.complete:
        return PATTERN
    return "replicas differ" if facts.replicas.found else ""


def _wrong_weights(facts: Facts) -> Judgement:
    """No rank is at fault where the library lost experts on all of them."""
    numbers, held = facts.gradients, facts.ownership
    text = held.text
    if numbers.wrong:
        text += f" {_gradients(facts)}"
    elif numbers.compared:
        text += f" {plural(numbers.compared, 'gradient')} as in the reference all the same."
    return Judgement(
        Verdict.WRONG_WEIGHTS, Confidence.HIGH, text, culprits=few(held.ranks, facts.evidence)
    )


def _first_wrong(facts: Facts) -> int | None:
    """The first step with a wrong gradient."""
    of_inputs = 1 if any(part.wrong for part in facts.parts) else None
    return facts.gradients.step if facts.gradients.step is not None else of_inputs


def _applied(facts: Facts) -> Judgement | None:
    """What the optimizer left is wrong after a step whose gradients were right and in which
    replicas agreed."""
    found, first, wrong = facts.applied, facts.replicas.first, _first_wrong(facts)
    if found.step is None or (wrong is not None and wrong <= found.step):
        return None
    if first is not None and first.step <= found.step:
        return None
    text = optimizer_update.sentence(found)
    who = few(found.ranks, facts.evidence)
    return Judgement(Verdict.WRONG_WEIGHTS, Confidence.HIGH, text, who, what=found.what)


def _replicas(facts: Facts) -> Judgement | None:
    """What must be equal and is not, or a norm that is wrong, before any gradient was wrong."""
    first, norm, wrong = facts.replicas.first, facts.replicas.wrong_norm, _first_wrong(facts)
    if first is not None and (wrong is None or first.step < wrong):
        return Judgement(
            Verdict.REPLICA_DIVERGENCE,
            Confidence.HIGH,
            replica_sentences.of_replicas(facts.replicas),
            culprits=first.culprits,
            victims=tuple(sorted(set(first.ranks) - set(first.culprits))) if first.culprits else (),
            what=first.what,
        )
    if norm is not None and facts.gradients.compared and (wrong is None or norm.step < wrong):
        return Judgement(
            Verdict.WRONG_GRADIENTS,
            Confidence.HIGH,
            replica_sentences.of_wrong_norm(norm),
            what="clipping norm",
        )
    return None
