"""The communication library reports a mismatch of collectives; no schedule shows which."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import said
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs
from moediag.diagnosis.words.calls import sentence
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.COLLECTIVE_MISMATCH
_MANY = 3  # ranks that agree against one


def find(facts: Facts) -> dict[str, set[int]] | None:
    """The ranks by the call that the library says they made; empty where it does not say."""
    reports = [one for one in facts.evidence.reports if one.kind == "mismatch"]
    if not reports and not any(failure.mismatch for failure in facts.failed):
        return None
    sides: dict[str, set[int]] = {}
    for one in reports:
        for rank, call in one.sides:
            sides.setdefault(call, set()).add(rank)
    return sides


def judge(facts: Facts, found: dict[str, set[int]]) -> Judgement:
    evidence = facts.evidence
    if len(found) < 2:
        failed = tuple(failure for failure in facts.failed if failure.mismatch)
        whose = f"{ranks(f.rank for f in failed).capitalize()}: the" if failed else "The"
        text = f"{whose} communication library says that collectives did not match"
        text += f" ({said(failed)})" if failed else ""
        return Judgement(Confidence.LOW, f"{text}. No recorded schedule shows which.")
    order = sorted(found.items(), key=lambda side: (-len(side[1]), sorted(side[1])))
    pieces = [f"{ranks(who)} {'is' if len(who) == 1 else 'are'} in {call}" for call, who in order]
    text = sentence(f"different calls meet: {'; '.join(pieces)}")
    (_, most), (_, few) = order[0], order[-1]
    alone = len(order) == 2 and len(most) >= _MANY and len(few) == 1 and not most & few
    if alone:
        text += f" {ranks(few).capitalize()} alone differs."
    else:
        text += " The message does not show which of them is wrong."
    return Judgement(
        Confidence.MEDIUM if alone else Confidence.LOW,
        text,
        culprits=tuple(sorted(few)) if alone else (),
        victims=tuple(sorted(most)) if alone else (),
        next_step=foreign_jobs.next_step(evidence),
    )
