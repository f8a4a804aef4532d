"""The guard (`moediag.recorder.guard`) stopped ranks before a reduction that did not match."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import GUARD, Failure
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, how_sure, victims
from moediag.diagnosis.words import cause
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.CRASH


def find(facts: Facts) -> list[Failure] | None:
    """The guard's failures, if the guard raised first."""
    if not facts.own or facts.own[0].name != GUARD:
        return None
    return [failure for failure in facts.own if failure.name == GUARD]


def judge(facts: Facts, found: list[Failure]) -> Judgement:
    who = ranks(failure.rank for failure in found)
    d = facts.divergence
    if d is None:
        text = f"The guard stopped {who}: {found[0].summary}"
        return Judgement(Confidence.MEDIUM, text, failure=found[0])
    # The ranks stopped before the divergence had an effect.
    text = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False, guarded=True)
    earlier = any(call is not None and call.op == "all_gather" for call in d.calls.values())
    when = "at the next reduction" if earlier else "before that reduction"
    return Judgement(
        how_sure(facts),
        f"{text} The guard stopped {who} {when} ({GUARD}).",
        culprits=facts.blame.culprits,
        victims=victims(facts),
        divergence=True,
        failure=found[0],
    )
