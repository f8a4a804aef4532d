"""Watchdogs of NCCL report open calls, and nothing else is recorded: who is behind."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.schedules.log_positions import Positions
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.evidence.rank_stacks import in_collective, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "watchdog"


def find(facts: Facts) -> Positions | None:
    """None if it names no rank while one lost its connection: that rank's message says more."""
    found = facts.positions
    return None if found is None or (facts.failed and not found.culprits) else found


def _waits_elsewhere(facts: Facts) -> set[int]:
    """Ranks that themselves waited in communication, by their error or their stack. One that is
    behind in a group of NCCL may wait in one of gloo, which has no watchdog."""
    waits = {failure.rank for failure in facts.failed if failure.consequence}
    for rank, seen in facts.evidence.ranks.items():
        stack = that_counts(seen.stacks)
        if stack is not None and in_collective(stack):
            waits.add(rank)
    return waits


def judge(facts: Facts, found: Positions) -> Judgement:
    evidence = facts.evidence
    text = log_sentences.of_positions(found, evidence)
    text = " ".join(part for part in (text, log_sentences.signals(evidence)) if part)
    elsewhere = _waits_elsewhere(facts) & set(found.culprits)
    named = tuple(rank for rank in found.culprits if rank not in elsewhere)
    if elsewhere:
        one = len(elsewhere) == 1
        text += (
            f" {ranks(elsewhere).capitalize()} {'was' if one else 'were'} in another call of the "
        )
        text += "communication library, so the ranks wait for each other."
    if not named:
        text += " The log does not show which rank is the cause."
    return Judgement(
        Confidence.MEDIUM if named else Confidence.LOW,
        text,
        culprits=named,
        victims=tuple(sorted({*found.victims, *elsewhere})) if named else (),
        pattern=f"{SIGNATURE} {'behind' if named else 'timeout'}",
        next_step=foreign_jobs.next_step(evidence, named),
    )
