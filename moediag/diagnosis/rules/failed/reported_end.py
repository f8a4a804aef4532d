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
    said = errors[-1] if errors else found[0]
    text = "It is not known which rank of the job failed. "
    text += sentence(f"{'a process raised' if errors else 'the log says:'} {said.text}".rstrip("."))
    if said.kind in ("error", "failed") and is_communication(RankError("RuntimeError", said.text)):
        text += " That is the consequence of another rank's end or wait, not the cause."
    return Judgement(
        Confidence.LOW,
        text,
        pattern=SIGNATURE,
        next_step=foreign_jobs.next_step(facts.evidence),
    )
