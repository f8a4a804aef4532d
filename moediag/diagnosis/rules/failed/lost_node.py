"""Ranks lost the connection to a peer, and a node stopped sending data."""

from __future__ import annotations

from moediag.diagnosis.blame.nodes import silent
from moediag.diagnosis.end_states.failures import said
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement, apart
from moediag.diagnosis.words.node_sentences import silence
from moediag.evidence.model import Node
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.CRASH
SIGNATURE = "silent-node"


def find(facts: Facts) -> tuple[Node, ...] | None:
    return (silent(facts.evidence) or None) if facts.failed else None


def judge(facts: Facts, found: tuple[Node, ...]) -> Judgement:
    failed = tuple(sorted(f.rank for f in facts.failed))
    return Judgement(
        Confidence.MEDIUM,
        f"{ranks(failed).capitalize()} lost the connection to a peer ({said(facts.failed)}). "
        f"{silence(found)} It went down or was disconnected; the evidence does not show which.",
        culprits=facts.silent_ranks,
        victims=apart(tuple(facts.evidence.ranks), facts.silent_ranks),
        failure=facts.failed[0],
        pattern=SIGNATURE,
    )
