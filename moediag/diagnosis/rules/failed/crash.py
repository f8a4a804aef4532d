"""Ranks raised their own exception, or died. All ranks that failed in the same way are culprits,
except ranks that ended without a trace: if several did, no rank is named."""

from __future__ import annotations

from moediag.diagnosis.end_states import mixed_optimizer
from moediag.diagnosis.end_states.failures import Failure
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
    first = found[0]
    same = tuple(sorted(f.rank for f in found if (f.name, f.where) == (first.name, first.where)))
    text = f"{ranks(same).capitalize()} {_ended(first, facts.evidence)}"
    text = text if text.endswith("!") else text.rstrip(".") + "."
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
        Confidence.HIGH if certain and not unordered else Confidence.MEDIUM,
        text,
        culprits=() if unordered else same,
        victims=() if unordered else apart(tuple(facts.evidence.ranks), same),
        divergence=left is not None,
        failure=first,
    )


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
