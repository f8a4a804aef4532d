"""A job that was only recorded ended by itself, and its schedules agree."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs, law_sentences
from moediag.result import Confidence, Verdict
from moediag.result.wording import plural, ranks

VERDICT = Verdict.CLEAN


def find(facts: Facts) -> bool | None:
    return facts.evidence.foreign or facts.evidence.watched or None


def judge(facts: Facts, found: bool) -> Judgement:
    evidence = facts.evidence
    if evidence.foreign:
        text, whole = foreign_jobs.of_records(evidence)
        return Judgement(Confidence.MEDIUM if whole else Confidence.LOW, text)
    unknown = facts.unrecorded
    recorded = sorted(set(evidence.ranks) - set(unknown))
    laws = law_sentences.clean(facts.laws)
    text = f"No hang, no crash; {laws or 'numbers were not checked'}. "
    if evidence.world_size == 1:
        return Judgement(Confidence.HIGH, f"{text}The only rank finished normally.")
    steps = max(evidence.ranks[rank].last_step for rank in recorded)
    text += f"{ranks(recorded).capitalize()} finished normally after {plural(steps, 'step')}; "
    text += "their recorded schedules agree."
    if unknown:
        text += f" Nothing was recorded of {ranks(unknown)}."
    return Judgement(Confidence.MEDIUM if unknown else Confidence.HIGH, text)
