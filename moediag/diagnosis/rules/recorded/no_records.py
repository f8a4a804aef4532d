"""A job that was only recorded shows no failure; the evidence is too thin to rule one out."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, undecided
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.result import Verdict

VERDICT = Verdict.INCONCLUSIVE


def find(facts: Facts) -> str | None:
    """What is missing, as a sentence."""
    evidence = facts.evidence
    if evidence.foreign:
        known, size = sum(map(was_recorded, evidence.ranks.values())), evidence.world_size
        calls = [call for seen in evidence.ranks.values() for call in seen.collectives]
        if calls and (2 * known > size or not all(call.completed for call in calls)):
            return None
        if calls:
            return f"Calls of {known} of {size} ranks show no failure; the others were not seen."
        text = "The evidence shows no failure but is too thin to rule one out."
        where = log_sentences.stacks(evidence)
        return f"{text} {where}".rstrip()
    if evidence.watched and not any(map(was_recorded, evidence.ranks.values())):
        return "No rank was recorded, so nothing is known about this job."
    return None


def judge(facts: Facts, found: str) -> Judgement:
    evidence = facts.evidence
    return undecided(found, foreign_jobs.next_step(evidence) if evidence.foreign else "")
