"""Calls of a watched job failed, and the program ended normally all the same."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words.calls import describe
from moediag.evidence.model import Collective
from moediag.result import Confidence, Verdict
from moediag.result.wording import plural, ranks

VERDICT = Verdict.CRASH
SIGNATURE = "failed call"


def find(facts: Facts) -> dict[int, list[Collective]] | None:
    """The failed calls of each rank."""
    if not facts.evidence.watched:
        return None
    failed = {
        rank: [call for call in seen.collectives if call.failed]
        for rank, seen in sorted(facts.evidence.ranks.items())
    }
    return {rank: calls for rank, calls in failed.items() if calls} or None


def judge(facts: Facts, found: dict[int, list[Collective]]) -> Judgement:
    rank, call = min(
        ((rank, calls[0]) for rank, calls in found.items()), key=lambda one: one[1].time
    )
    group = facts.evidence.ranks[rank].groups.get(call.group)
    text = (
        f"On rank {rank}, {describe(call)} on {group.label if group else call.group} failed "
        f"({call.failed}), and the program continued without its result."
    )
    total = sum(map(len, found.values()))
    if total > 1:
        text += f" {plural(total, 'call')} failed in all, on {ranks(found)}."
    return Judgement(
        Confidence.MEDIUM,
        f"{text} The evidence does not show which rank caused it.",
        pattern=SIGNATURE,
    )
