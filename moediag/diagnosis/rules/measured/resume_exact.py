"""After a save and a load, training continued exactly as in an uninterrupted run."""

from __future__ import annotations

from moediag.diagnosis.numbers.resume import ResumeFacts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.result import Verdict

VERDICT = Verdict.CLEAN


def find(facts: Facts) -> ResumeFacts | None:
    return facts.resume if facts.resume.verdict == VERDICT else None


def judge(facts: Facts, found: ResumeFacts) -> Judgement:
    return Judgement(found.confidence, found.text)
