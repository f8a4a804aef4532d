"""Ranks raised their own exception, or died. All ranks that failed in the same way as the first are
culprits, and so are deaths that may have come first. Of ranks that ended without a trace, none is
named if several did. A rank that failed by itself is never a victim."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.end_states import mixed_optimizer
from moediag.diagnosis.end_states.failures import FATAL_SIGNALS, Failure, first_of
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words.calls import describe
from moediag.evidence.model import UNTOLD, Evidence
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.CRASH


def find(facts: Facts) -> tuple[Failure, ...] | None:
    return facts.own or None


def judge(facts: Facts, found: tuple[Failure, ...]) -> Judgement:
    leading, ordered = first_of(found, facts.evidence.deaths)
    first = leading[0]
    kinds = dict.fromkeys((f.name, f.where) for f in leading)
    alike = {kind: [f for f in found if (f.name, f.where) == kind] for kind in kinds}
    same = tuple(sorted(f.rank for those in alike.values() for f in those))
    text = " ".join(_sentence(those, facts.evidence) for those in alike.values())
    later = [f for f in found if f.rank not in same and (f.message or f.where)]
    if not ordered:
        text += " Not known which of them came first."
    elif later and first.name in FATAL_SIGNALS:
        text += f" Then {_sentence(later[:1], facts.evidence, begins=False)}"
    mixture = mixed_optimizer.of_crash(facts.evidence, found)
    text += f" {mixture}" if mixture else ""
    # A launcher that loses a rank ends the others, and then none of them leaves a trace.
    unordered = first.name == UNTOLD and len(same) > 1
    left = facts.divergence
    if left is None or left.kind != "missing" or not set(left.absent) & set(same):
        left = None
    if unordered:
        text += " Not known which ended first: a launcher that loses one rank ends the rest."
    elif left is not None:
        text += f" {_left_waiting(left)}"
    certain = first.message or first.where or left is not None
    return Judgement(
        Confidence.HIGH if certain and ordered and not unordered else Confidence.MEDIUM,
        text,
        culprits=() if unordered else same,
        victims=() if unordered else apart(_others(facts, later), same),
        divergence=left is not None,
        failure=first,
    )


def _others(facts: Facts, later: Sequence[Failure]) -> tuple[int, ...]:
    failed = {f.rank for f in later} | {f.rank for f in facts.own if f.name in FATAL_SIGNALS}
    return tuple(rank for rank in facts.evidence.ranks if rank not in failed)


def _sentence(alike: Sequence[Failure], evidence: Evidence, begins: bool = True) -> str:
    who = ranks(f.rank for f in alike)
    text = f"{who.capitalize() if begins else who} {_ended(alike[0], evidence)}"
    return text if text.endswith("!") else text.rstrip(".") + "."


def _ended(failure: Failure, evidence: Evidence) -> str:
    if failure.message or failure.where:
        text = f"raised {failure.name}" + (f" at {failure.where}" if failure.where else "")
        text += f": {failure.summary}" if failure.summary else ""
        return text + (f" (after {failure.after})" if failure.after else "")
    if failure.name.startswith("exit code"):
        return f"ended with {failure.name} and left no exception"
    if failure.name == UNTOLD:
        return "ended without a trace (killed, or by os._exit: the launcher did not record which)"
    return f"died by {failure.name}" + (_killed(evidence) if failure.name == "SIGKILL" else "")


def _killed(evidence: Evidence) -> str:
    kills = evidence.oom_kills
    if kills:
        times = "once" if kills == 1 else f"{kills} times"
        return f" (out of memory: the kernel's OOM killer ran {times} meanwhile)"
    if kills == 0:
        return " (killed from outside: the kernel's OOM killer did not run)"
    return " (killed from outside, or out of memory)"


def _left_waiting(left: Divergence) -> str:
    """Which ranks wait for a call of the ranks that failed."""
    calls = {rank: call for rank, call in left.calls.items() if call is not None}
    where = describe(next(iter(calls.values())))
    return f"{ranks(calls).capitalize()} then waited in {where} on {left.group.label}."
