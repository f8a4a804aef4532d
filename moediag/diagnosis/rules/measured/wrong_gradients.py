"""Gradients of parameters, or those that MoE blocks pass down, differ from the reference."""

from __future__ import annotations

from moediag.diagnosis.numbers import by_part, scale_factor
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart, how_sure
from moediag.diagnosis.words import cause
from moediag.diagnosis.words.replica_sentences import of_replicas
from moediag.diagnosis.words.verify_sentences import of_otherwise
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> str | None:
    """Which gradients are wrong, and where in the model; None without any."""
    if not facts.gradients.wrong and not any(part.wrong for part in facts.parts):
        return None
    return which(facts)


def which(facts: Facts) -> str:
    """Which gradients are wrong, and where in the model."""
    count = cause.of_gradients(facts.gradients) if facts.gradients.wrong else ""
    by_place = by_part.sentence(facts.parts), scale_factor.sentences(facts.factors)
    return " ".join(filter(None, (count, *by_place, of_otherwise(facts.evidence))))


def judge(facts: Facts, found: str) -> Judgement:
    d, lost = facts.divergence, facts.unrecorded
    culprits = facts.blame.culprits if d is not None else ()
    if d is not None:
        why = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False)
        text = f"{why} {found}"
    elif lost:
        text = f"{found} No schedule of {ranks(lost)} was recorded: whether a rank is at fault is "
        text += "not known."
    elif facts.replicas.first is not None:
        text = f"{found} {of_replicas(facts.replicas)}"
    else:
        text = f"{found} The schedules agree: no rank is at fault, all compute the same wrong "
        text += "result."
    certain = Confidence.MEDIUM if lost else Confidence.HIGH
    return Judgement(
        how_sure(facts) if d is not None else certain,
        text,
        culprits=culprits,
        victims=apart(facts.gradients.ranks, culprits),
        divergence=d is not None,
        pattern=_pattern(facts) if d is None else "",
        until=facts.gradients.step,
        gradients=True,
        next_step=_next_step(facts),
    )


def _pattern(facts: Facts) -> str:
    if facts.factors.complete:
        return scale_factor.PATTERN
    return "replicas differ" if facts.replicas.found else ""


def _next_step(facts: Facts) -> str:
    """What the comparison says to do, if anything."""
    outcomes = (seen.outcome for seen in facts.evidence.ranks.values())
    return next((o.next_step for o in outcomes if o is not None and o.next_step), "")
