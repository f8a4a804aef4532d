"""Every rank that was seen waits in `init_process_group`: they do not find each other."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import meeting
from moediag.evidence.rank_stacks import that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

VERDICT = Verdict.HANG
SIGNATURE = "rendezvous"


def find(facts: Facts) -> tuple[int, ...] | None:
    """The ranks in the rendezvous; None if a rank is elsewhere or has made a call."""
    if not facts.waiting or any(seen.collectives for seen in facts.evidence.ranks.values()):
        return None
    inside = []
    for rank, seen in sorted(facts.evidence.ranks.items()):
        stack = that_counts(seen.stacks)
        if stack is not None and not meeting.is_meeting(stack.frames):
            return None
        inside += [rank] * (stack is not None)
    return tuple(inside) or None


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    evidence = facts.evidence
    lacking = sorted(set(range(evidence.world_size)) - set(found))
    if lacking:
        wait = "waits" if len(found) == 1 else "wait"
        text = (
            f"{ranks(found).capitalize()} {wait} in init_process_group, and nothing is known of "
            f"{ranks(lacking)}: the others wait for ranks that never joined, or for the network. "
            "It is not known which rank is at fault."
        )
        return Judgement(
            Confidence.LOW, text, victims=found, pattern=SIGNATURE, next_step=meeting.LOOK
        )
    old = meeting.old_store(evidence)
    text = f"All {len(found)} ranks wait in init_process_group and do not find each other. "
    text += old or "The evidence does not show why, nor which rank is at fault."
    return Judgement(
        Confidence.MEDIUM if old else Confidence.LOW,
        text,
        victims=found,
        pattern=SIGNATURE,
        next_step=meeting.OWN_PREFIX if old else meeting.LOOK,
    )
