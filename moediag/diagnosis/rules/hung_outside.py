"""Detectors of ranks that wait before a job's first call or after its last, by their stacks."""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector
from moediag.diagnosis.words import leaving, meeting
from moediag.evidence.rank_stacks import that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, does, ranks


@detector(Verdict.HANG)
def unended_ranks(facts: Facts) -> Judgement | None:
    """Programs of ranks or of their peers have returned, and their own processes do not end."""
    found = leaving.unended(facts.evidence)
    if not found:
        return None
    return Judgement(
        Confidence.MEDIUM,
        leaving.sentences(facts.evidence, found),
        culprits=found,
        pattern="exit",
        next_step="" if leaving.running(facts.evidence, found) else leaving.NEXT,
    )


@detector(Verdict.HANG)
def late_ranks(facts: Facts) -> Judgement | None:
    """All other ranks wait in `init_process_group` for ranks that have not called it."""
    late = meeting.late(facts.evidence, facts.waiting, facts.elsewhere)
    if not late:
        return None
    return Judgement(
        Confidence.MEDIUM,
        f"{meeting.of_late(facts.waiting, late)} {whereabouts(facts.evidence, late)}".rstrip(),
        culprits=late,
        victims=tuple(sorted(facts.waiting)),
        pattern="rendezvous",
    )


@detector(Verdict.HANG)
def unequal_meeting(facts: Facts) -> Judgement | None:
    """A rank waits in `init_process_group`, and ranks were configured differently."""
    evidence = facts.evidence
    inside = [rank for rank in evidence.ranks if meeting.is_in(evidence, rank)]
    found = meeting.unequal(evidence)
    if evidence.stall is None or not inside or not found:
        return None
    odd = meeting.odd(evidence)
    which = "" if odd else " It is not known which of them is wrong."
    return Judgement(
        Confidence.MEDIUM,
        f"{capital(does(inside, 'waits in init_process_group'))}. {found}{which}",
        culprits=odd,
        victims=apart(facts.waiting, odd) if odd else tuple(facts.waiting),
        pattern="rendezvous",
        next_step=meeting.EQUAL,
    )


@detector(Verdict.HANG)
def unmet_ranks(facts: Facts) -> Judgement | None:
    """Every rank that was seen waits in `init_process_group`: they do not find each other."""
    evidence, found = facts.evidence, _in_rendezvous(facts)
    if not found:
        return None
    lacking = sorted(set(range(evidence.world_size)) - set(found))
    if lacking:
        text = (
            f"{capital(does(found, 'waits in init_process_group'))}, and nothing is known of "
            f"{ranks(lacking)}: the others wait for ranks that never joined, or for the network. "
            "It is not known which rank is at fault."
        )
        old = ""
    else:
        old = meeting.old_store(evidence)
        text = f"All {len(found)} ranks wait in init_process_group and cannot find each other. "
        text += old or "The evidence does not show why, nor which rank is at fault."
    return Judgement(
        Confidence.MEDIUM if old else Confidence.LOW,
        text,
        victims=found,
        pattern="rendezvous",
        next_step=meeting.OWN_PREFIX if old else meeting.LOOK,
    )


def _in_rendezvous(facts: Facts) -> tuple[int, ...]:
    """The ranks in the rendezvous; () if a rank is elsewhere or has made a call."""
    if not facts.waiting or any(seen.collectives for seen in facts.evidence.ranks.values()):
        return ()
    inside = []
    for rank, seen in sorted(facts.evidence.ranks.items()):
        stack = that_counts(seen.stacks)
        if stack is not None and not meeting.is_meeting(stack.frames):
            return ()
        inside += [rank] * (stack is not None)
    return tuple(inside)
