"""Ranks wait in a collective, no recorded rank is at fault, and a node stopped sending data."""

from __future__ import annotations

from moediag.diagnosis.blame.nodes import explained, open_call, silent
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words.calls import describe
from moediag.diagnosis.words.node_sentences import silence
from moediag.evidence.model import Collective, Evidence, Node
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "silent-node"


def find(facts: Facts) -> tuple[Node, ...] | None:
    if not facts.waiting or facts.elsewhere or not facts.silent_ranks:
        return None
    return silent(facts.evidence)


def judge(facts: Facts, found: tuple[Node, ...]) -> Judgement:
    evidence, waiting, gone = facts.evidence, facts.waiting, facts.silent_ranks
    calls = {rank: call for rank in waiting if (call := open_call(evidence, rank)) is not None}
    for_them = explained(evidence, calls, set(gone))
    text = f"{silence(found)} {ranks(waiting).capitalize()} "
    first = next((rank for rank in sorted(calls) if rank in for_them), None)
    if first is None:
        text += "waited in a collective, and nothing shows that they waited for ranks there, so no "
        return Judgement(Confidence.LOW, f"{text}rank is named.")
    text += "waits" if len(waiting) == 1 else "wait"
    text += f" in {describe(calls[first])} on {_group(evidence, first, calls[first])}, "
    if set(waiting) - for_them:
        text += f"but {ranks(set(waiting) - for_them)} for no rank there, so no rank is named."
        return Judgement(Confidence.LOW, text)
    text += (
        f"for {ranks(gone)} there: that node is down, disconnected or stopped; the evidence does "
        "not show which."
    )
    return Judgement(
        Confidence.MEDIUM,
        text,
        culprits=gone,
        victims=tuple(sorted(waiting)),
        pattern=SIGNATURE,
    )


def _group(evidence: Evidence, rank: int, call: Collective) -> str:
    group = evidence.ranks[rank].groups.get(call.group)
    return group.label if group is not None else call.group
