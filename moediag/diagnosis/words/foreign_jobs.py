"""Sentences about jobs that moediag did not run: the stuck call, what records show, and what to
collect next time."""

from __future__ import annotations

from moediag.diagnosis.schedules.align import lost_prefix, was_recorded
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words.calls import describe
from moediag.evidence.model import Evidence
from moediag.result.wording import plural, ranks


def of_frontier(found: Frontier, evidence: Evidence) -> str:
    """Where the job hangs, and what that implies for the suspects."""
    if found.call is None or found.group is None:
        return "Ranks wait in communication, and no call was recorded."
    call, group = found.call, found.group
    what = f"{describe(call)} on {group.label} (call {call.position} of that group)"
    if found.basis == "unseen":
        text = f"Every rank that was seen has issued {what} and it does not complete. "
        text += f"Nothing was found of {ranks(found.unseen)}, which must take part: ended, or not "
        text += "collected."
        return text if found.suspects else f"{text} Several ranks left nothing: no rank is named."
    if found.basis == "habit":
        return (
            f"{_subject(found.suspects, 'waits', 'wait')} in {what}, where other members were "
            "not seen; other ranks made another call after the same calls."
        ).capitalize()
    if found.basis == "device":
        text = f"The schedules agree and no rank is missing, but {what} "
        if not found.suspects:
            return text + "does not complete, and different ranks lag in different calls."
        done = "completed" if _completed(found, evidence) else "began"
        return text + (
            f"{done} on {ranks(found.ahead)} and not on {ranks(found.suspects)}: not a mismatch "
            "of code, but a device or a link that is stuck."
        )
    return (
        f"All ranks issued {what}, the schedules agree and no rank is missing, but it does not "
        "complete: not a mismatch of code, but a device, the network, or an unrecorded call."
    )


def of_records(evidence: Evidence) -> tuple[str, bool]:
    """(what the records of a job without open calls show, whether they are complete)."""
    recorded = {rank: seen for rank, seen in evidence.ranks.items() if was_recorded(seen)}
    calls = sum(len(seen.collectives) for seen in recorded.values())
    text = (
        f"{plural(calls, 'recorded call')} of {ranks(recorded)} match and all completed; "
        "nothing was measured."
    )
    whole = len(recorded) == evidence.world_size and not any(map(lost_prefix, recorded.values()))
    return text, whole


def to_collect(evidence: Evidence) -> str:
    """What to collect to learn more; "" where nothing would help."""
    seen = evidence.ranks.values()
    wanted = []
    dumped = [s for s in seen if was_recorded(s)]
    if not dumped or len(dumped) < evidence.world_size:
        wanted.append(
            "a Flight Recorder dump of every rank (TORCH_FR_BUFFER_SIZE=20000, "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
        )
    elif any(map(lost_prefix, dumped)):
        wanted.append("more calls in each dump (TORCH_FR_BUFFER_SIZE=20000)")
    elif not any(c.site for s in dumped for c in s.collectives):
        wanted.append("dumps with stack traces (pickle, not JSON)")
    if not seen or not all(s.stacks for s in seen):
        wanted.append("`py-spy dump` of every rank while it hangs")
    return f" Next time collect {' and '.join(wanted)}." if wanted else ""


def _completed(found: Frontier, evidence: Evidence) -> bool:
    call = found.call
    return call is not None and any(
        c.completed
        for rank in found.ahead
        if rank in evidence.ranks
        for c in evidence.ranks[rank].collectives
        if (c.group, c.position) == (call.group, call.position)
    )


def _subject(who: tuple[int, ...], one: str, many: str) -> str:
    return f"{ranks(who)} {one if len(who) == 1 else many}"
