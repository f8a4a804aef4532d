"""Ranks failed, or a recorded job ended, and their schedules do not match.

An exception of the program decides instead if it came first or no library notices the mismatch.
"""

from __future__ import annotations

from moediag.diagnosis.blame.nodes import silent
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, how_sure, victims
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words import cause
from moediag.result import Verdict

VERDICT = Verdict.COLLECTIVE_MISMATCH


def find(facts: Facts) -> Divergence | None:
    d, own = facts.divergence, facts.own
    if d is None:
        return None
    missing = d.kind == "missing"
    if not facts.failed:
        known = not missing or facts.evidence.watched
        return d if _only_recorded(facts) and known else None
    if missing:  # the others lost the connection to the rank that made no call
        return None if own or silent(facts.evidence) else d
    late = own and 0 < own[0].time < d.time
    # A silent divergence does not end a rank. An exception of the program is another failure;
    # an abort by the library is a later consequence of the divergence (sizes then differ too).
    return d if not late and (facts.loud or not own) else None


def _only_recorded(facts: Facts) -> bool:
    """Whether this is a user's own job that ended by itself."""
    evidence = facts.evidence
    stopped = evidence.stall is not None or evidence.timed_out or bool(evidence.launch_error)
    return (evidence.foreign or evidence.watched) and not stopped


def judge(facts: Facts, found: Divergence) -> Judgement:
    text = cause.of_divergence(found, facts.blame, facts.evidence.backend, died=True)
    if found.silent:
        text += cause.out_of_step(facts.evidence, sorted(facts.evidence.ranks))
    text += cause.called_at(found, facts.blame, facts.evidence, text)
    return Judgement(
        how_sure(facts),
        text,
        culprits=facts.blame.culprits,
        victims=victims(facts),
        divergence=True,
    )
