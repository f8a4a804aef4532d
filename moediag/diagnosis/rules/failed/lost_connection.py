"""Ranks lost the connection to a peer, and the evidence does not show why."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import Failure, said
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import meeting
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.CRASH


def find(facts: Facts) -> tuple[Failure, ...] | None:
    return facts.failed or None


def judge(facts: Facts, found: tuple[Failure, ...]) -> Judgement:
    text = f"{ranks(f.rank for f in found).capitalize()} lost the connection to a peer "
    errors = [facts.evidence.ranks[f.rank].error for f in found]
    if all(error is not None and meeting.is_meeting(error.frames) for error in errors) and (
        old := meeting.old_store(facts.evidence)
    ):
        text += f"in init_process_group ({said(found)}). {old}"
        return Judgement(Confidence.MEDIUM, text, failure=found[0], next_step=meeting.OWN_PREFIX)
    text += f"({said(found)}); the evidence shows neither why nor which rank is at fault."
    return Judgement(Confidence.LOW, text, failure=found[0])
