"""Ranks of a watched job constructed an optimizer but never a process group."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.schedules.align import was_recorded
from moediag.result import Confidence, Verdict
from moediag.result.wording import plural, ranks

VERDICT = Verdict.REPLICA_DIVERGENCE
SIGNATURE = "no process group"


def find(facts: Facts) -> dict[int, tuple[str, ...]] | None:
    """Each rank's optimizers. None if any rank was recorded, or did not tell how it ended."""
    evidence = facts.evidence
    if not evidence.watched or any(map(was_recorded, evidence.ranks.values())):
        return None
    told = {rank: seen.alone or () for rank, seen in evidence.ranks.items()}
    return told if len(told) > 1 and all(told.values()) else None


def judge(facts: Facts, found: dict[int, tuple[str, ...]]) -> Judgement:
    names = ", ".join(sorted({name for own in found.values() for name in own}))
    return Judgement(
        Confidence.MEDIUM,
        f"{ranks(found).capitalize()} were started as one job (WORLD_SIZE is "
        f"{facts.evidence.world_size}) and each constructed an optimizer ({names}), but none "
        f"created a process group: each rank trained alone, so this was "
        f"{plural(len(found), 'separate training run')}, and nothing averaged their gradients.",
        pattern=SIGNATURE,
    )
