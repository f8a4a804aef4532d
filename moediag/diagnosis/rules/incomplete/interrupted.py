"""The run was interrupted: by a person, or by a scheduler's signal.

A wait that had not lasted long enough to be called a hang is described, but names no rank.
An exception that ended a rank before the interruption decides instead.
"""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import cause
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> bool | None:
    failed = any(f.message and f.rank in facts.evidence.deaths for f in facts.own)
    return (facts.evidence.interrupted and not failed) or None


def judge(facts: Facts, found: bool) -> Judgement:
    evidence = facts.evidence
    text = "The run was interrupted before it ended."
    if evidence.stall is None:
        return Judgement(Confidence.LOW, text)
    text += f" By then no rank had made progress for {evidence.stall.window:.0f} s. "
    if facts.divergence is not None:
        text += cause.of_divergence(facts.divergence, facts.blame, evidence.backend, died=False)
    else:
        text += f"{ranks(facts.waiting).capitalize()} waited in a collective."
    text += f" {whereabouts(evidence, facts.elsewhere)}".rstrip()
    text += " It is not known whether the job would have continued."
    return Judgement(Confidence.LOW, text, divergence=facts.divergence is not None)
