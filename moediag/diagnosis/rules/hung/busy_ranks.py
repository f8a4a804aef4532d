"""Some ranks wait in a collective while others are outside any: the others are named.

For evidence of other tools this counts only if no calls were recorded, and if all other ranks were
seen and wait at the same place: ranks in different calls may be wrong themselves.
"""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.evidence.model import Evidence
from moediag.evidence.rank_stacks import stand, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG


def find(facts: Facts) -> tuple[int, ...] | None:
    evidence, elsewhere = facts.evidence, facts.elsewhere
    return (elsewhere or None) if not evidence.foreign or _awaited(facts) else None


def _awaited(facts: Facts) -> bool:
    """Whether stacks alone show that all ranks but a few wait in one call."""
    evidence, waiting = facts.evidence, facts.waiting
    seen = len(facts.elsewhere) + len(waiting)
    if _any_calls(evidence) or len(facts.elsewhere) >= len(waiting) or seen < evidence.world_size:
        return False
    stacks = [that_counts(evidence.ranks[rank].stacks) for rank in waiting]
    return None not in stacks and len({stand(one) for one in stacks if one is not None}) == 1


def _any_calls(evidence: Evidence) -> bool:
    return any(seen.collectives for seen in evidence.ranks.values())


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    text = f"{ranks(found).capitalize()} stopped outside any collective while "
    text += f"{ranks(facts.waiting)} waited. {whereabouts(facts.evidence, found)}"
    return Judgement(
        Confidence.MEDIUM,
        text.rstrip(),
        culprits=tuple(sorted(found)),
        victims=tuple(sorted(facts.waiting)),
    )
