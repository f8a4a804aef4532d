"""Stacks show ranks inside communication, and nothing else was recorded: no rank is named."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import sentence
from moediag.evidence.model import Evidence
from moediag.evidence.rank_stacks import (
    in_backward,
    in_collective,
    on_the_device,
    stand,
    that_counts,
)
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "stacks"


def find(facts: Facts) -> dict[str, list[int]] | None:
    """The ranks by where they stand; empty where only the ranks of the stacks are unknown."""
    evidence = facts.evidence
    if not evidence.foreign or any(seen.collectives for seen in evidence.ranks.values()):
        return None
    sides: dict[str, list[int]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        stack = that_counts(seen.stacks)
        if stack is None:
            continue
        if in_collective(stack):
            text = f"in {stand(stack, seen.libraries)}"
        elif in_backward(stack):
            text = f"in autograd, which may wait in communication: {stand(stack, seen.libraries)}"
        elif on_the_device(stack):
            text = f"waiting for the device in {stand(stack, seen.libraries)}"
        else:
            text = f"outside communication in {stand(stack, seen.libraries)}"
        sides.setdefault(text, []).append(rank)
    inside = any(rank in facts.waiting for who in sides.values() for rank in who)
    unnamed = any(one.kind == "stack" and one.op for one in evidence.reports)
    return sides if inside or unnamed else None


def judge(facts: Facts, found: dict[str, list[int]]) -> Judgement:
    evidence = facts.evidence
    sides = [f"{ranks(who)} {'is' if len(who) == 1 else 'are'} {at}" for at, who in found.items()]
    sides += log_sentences.unnamed_stacks(evidence)
    text = sentence("; ".join(sides))
    text += (
        f" {_open_question(found, evidence)} Only stacks were seen: they show where ranks are, not "
    )
    text += "which calls they made before."
    return Judgement(
        Confidence.LOW, text, pattern=SIGNATURE, next_step=foreign_jobs.next_step(evidence)
    )


def _open_question(found: dict[str, list[int]], evidence: Evidence) -> str:
    seen = sum(map(len, found.values()))
    if len(found) > 1:
        return (
            "It is not known which side is wrong: behind are those whose call comes first in the "
            "program's order, however few or many they are."
        )
    if len(found) == 1 and seen > 1:
        text = "All ranks that were seen are at the same place, so it is not known which rank they "
        return text + "wait for."
    return "It is not known which rank the job waits for."
