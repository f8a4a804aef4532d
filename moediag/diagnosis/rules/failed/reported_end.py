"""A log reports an exception, a kill or a broken device, but not of which rank."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import is_communication
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs
from moediag.diagnosis.words.calls import sentence
from moediag.evidence.model import RankError, Report
from moediag.result import Confidence, Verdict

VERDICT = Verdict.CRASH
SIGNATURE = "reported-end"

_KINDS = ("failed", "error", "machine", "killed", "ended", "clients")


def find(facts: Facts) -> tuple[Report, ...] | None:
    return tuple(one for one in facts.evidence.reports if one.kind in _KINDS) or None


def judge(facts: Facts, found: tuple[Report, ...]) -> Judgement:
    errors = [one for one in found if one.kind == "error"]
    text = "The log does not tell which rank failed. "
    if errors:
        last = errors[-1]
        text += sentence(f"a process raised {last.text}".rstrip("."))
        if is_communication(RankError("RuntimeError", last.text)):
            text += " That is the consequence of another rank's end or wait, not the cause."
    else:
        text += sentence(f"it says: {found[0].text}".rstrip("."))
    return Judgement(
        Confidence.LOW, text + foreign_jobs.to_collect(facts.evidence), pattern=SIGNATURE
    )
