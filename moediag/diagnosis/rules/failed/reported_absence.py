"""A library reports ranks that did not come to a barrier, a collective or the start of a group."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs
from moediag.diagnosis.words.calls import sentence
from moediag.evidence.model import Evidence, Report
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "reported-absence"

_NAMED = ("absent", "never", "missing", "open")
_UNNAMED = ("unanswered", "no-id")


def find(facts: Facts) -> tuple[Report, ...] | None:
    """The reports that name ranks; without any, those that say only that some rank is missing."""
    reports = facts.evidence.reports
    for kinds in (_NAMED, _UNNAMED):
        found = tuple(one for one in reports if one.kind in kinds)
        if found and (kinds is _NAMED or not facts.positions):
            return found
    return None


def judge(facts: Facts, found: tuple[Report, ...]) -> Judgement:
    evidence = facts.evidence
    texts = dict.fromkeys(_said(one) for one in found)
    text = " ".join(texts)
    named = {rank for one in found if one.kind in ("absent", "never") for rank in one.about}
    if not named:
        named = _lagging(evidence.reports)
    sure = bool(named) and not _other_groups(evidence)
    if named and not sure:
        text += " These are numbers within a group, and the log also shows other groups, so it is "
        text += "not known which ranks of the job they are."
    elif not named:
        text += " It is not known which rank the job waits for."
    writers = {one.rank for one in found if one.rank is not None}
    culprits = tuple(sorted(named)) if sure else ()
    return Judgement(
        Confidence.MEDIUM if sure else Confidence.LOW,
        text,
        culprits=culprits,
        victims=tuple(sorted(writers - named)) if sure else (),
        pattern=SIGNATURE,
        next_step=foreign_jobs.next_step(evidence, culprits),
    )


def _said(one: Report) -> str:
    about = ranks(one.about)
    if one.kind == "absent":
        text = sentence(f"{about} did not reach monitored_barrier within {one.seconds:g} s")
        if len(one.about) == 1:
            text += " Rank 0 asks the others in order and stops at the first that does not answer, "
            text += "so ranks after it may be missing as well."
        return text
    if one.kind == "never":
        return sentence(f"{about} joined no collective of the group, others wait")
    if one.kind == "missing":
        return sentence(f"{about} did not join call {one.seq} of the group")
    if one.kind == "open":
        return sentence(f"{about} joined call {one.seq} of the group, which did not finish there")
    if one.kind == "no-id":
        return sentence(
            f"rank {one.place} of a group waited for rank {one.about[0]} of it to set up NCCL's "
            f"communicator and gave up: rank {one.about[0]} of that group did not come to its "
            "first collective in time, or its store was not reachable"
        )
    return (
        "Ranks other than 0 reached monitored_barrier and lost rank 0 of it, whose own message "
        "tells which rank was missing."
    )


def _lagging(reports: tuple[Report, ...]) -> set[int]:
    """Ranks before the furthest call of a desync report, which lists the earliest call: where some
    finished it and some did not, or where no rank is further, they may wait for each other."""
    opened = [one for one in reports if one.kind == "open"]
    absent = [one for one in reports if one.kind == "missing"]
    lag = opened or absent
    if not lag or (opened and absent) or len({one.seq for one in lag}) > 1:
        return set()
    if opened:
        latest = max((one.seq or 0 for one in reports if one.kind == "snapshot"), default=0)
        if latest <= (opened[0].seq or 0):
            return set()
    return {rank for one in lag for rank in one.about}


def _other_groups(evidence: Evidence) -> bool:
    return any(one.group and not one.of_all for one in evidence.reports)
