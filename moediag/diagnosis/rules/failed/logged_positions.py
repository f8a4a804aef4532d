"""Watchdogs of NCCL report open calls, and nothing else is recorded: who is behind."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.schedules.log_positions import Positions
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.HANG
SIGNATURE = "watchdog"


def find(facts: Facts) -> Positions | None:
    """None if it names nobody while a rank lost its connection: that rank's message says more."""
    found = facts.positions
    return None if found is None or (facts.failed and not found.culprits) else found


def judge(facts: Facts, found: Positions) -> Judgement:
    evidence = facts.evidence
    text = log_sentences.of_positions(found, evidence)
    text = " ".join(part for part in (text, log_sentences.signals(evidence)) if part)
    if not found.culprits:
        text += " It is not known which rank is at fault."
    return Judgement(
        Confidence.MEDIUM if found.culprits else Confidence.LOW,
        text + foreign_jobs.to_collect(evidence),
        culprits=found.culprits,
        victims=found.victims,
        pattern=f"{SIGNATURE} {'behind' if found.culprits else 'timeout'}",
    )
