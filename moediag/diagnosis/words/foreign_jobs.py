"""Sentences about jobs that moediag did not run: the stuck call, what records show, and what to
collect next time."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.schedules.align import lost_prefix, was_recorded
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words.calls import describe
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import Evidence
from moediag.result.wording import agreeing, plural, ranks


def of_frontier(found: Frontier, evidence: Evidence) -> str:
    """Where the job hangs, and what that implies for the suspects."""
    if found.call is None or found.group is None:
        return "Ranks wait in communication, and no call was recorded."
    call, group = found.call, found.group
    what = f"{describe(call)} on {group.label} (call {call.position} of that group)"
    if found.basis == "unseen":
        text = f"Every rank that was seen has issued {what} and it does not complete. "
        text += f"Nothing is known of {ranks(found.unseen)}, which must take part"
        if found.suspects:
            gone = "It ended, or its dump was not collected."
            return f"{text}: all waiting ranks wait for it. {gone}"
        if found.others:
            text += f"; {plural(found.others, 'other call')} elsewhere did not complete either"
        return f"{text}. It is not known which rank the others wait for."
    if found.basis == "habit":
        return (
            f"{ranks(found.suspects)} {agreeing(f'waits in {what}', found.suspects)}, where other "
            "members were not seen; other ranks made another call after the same calls."
        ).capitalize()
    if found.basis == "device":
        text = f"All members issued {what}, and their calls match, but it "
        done = "completed" if _completed(found, evidence) else "began"
        return text + (
            f"{done} on {ranks(found.ahead)} and not on {ranks(found.suspects)}: not a mismatch "
            "of code, but a device or a link that is stuck."
        )
    stuck = "it does not complete"
    if found.others:
        stuck = f"it and {plural(found.others, 'call')} elsewhere never complete"
    return (
        f"All members issued {what}, their calls match, but {stuck}: not a mismatch of code, but a "
        "device, the network, or an unrecorded call. It is not known which rank is stuck."
    )


def may_be_late(absent: Sequence[int]) -> str:
    """What a page of dumps assumes that do not tell when they were written."""
    return (
        " The dumps do not show when they were written. NCCL writes them by itself only after a "
        f"timeout; if they were written on request, {ranks(absent)} may just be late."
    )


DUMP_AGAIN = (
    "Dump again a minute later and give both dumps, or give the time of the dumps with --taken-at "
    "(--taken-at timeout: NCCL's watchdog wrote them)."
)


def under_way(found: Frontier | None, missing: str, at_once: bool) -> str:
    """What dumps show that may be of a running job. ``missing``: the sentence about the first call
    to which a rank had not come, or "". ``at_once``: they were written just after the newest call.
    """
    text = "Calls had not completed when the dumps were written, "
    text += (
        "just after the newest call"
        if at_once
        else "and nothing in the dumps shows how long they had waited"
    )
    text += ": the job may have been running."
    if missing:
        text += f" If it hung: {missing[:1].lower() + missing[1:]}"
    elif found is not None and found.call is not None and found.group is not None:
        text += f" If it hung, it did so in {describe(found.call)} on {found.group.label}"
        text += f" (call {found.call.position} of that group)"
        text += f" and in {plural(found.others, 'other call')}." if found.others else "."
    return text


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


def next_step(evidence: Evidence, culprits: Sequence[int] = ()) -> str:
    """Where to look first, with culprits, and what to collect to learn more. "" where nothing would
    help."""
    recorded = any(map(was_recorded, evidence.ranks.values()))
    if evidence.looks is not None and not (recorded and culprits):
        return (
            "Start it again under moediag, which records the calls and then names the rank: "
            "moediag watch -- COMMAND"
        )
    seen = evidence.ranks.values()
    wanted = []
    dumped = [s for s in seen if was_recorded(s)]
    if not dumped or len(dumped) < evidence.world_size:
        wanted.extend(_written_at_a_timeout(evidence))
    elif any(map(lost_prefix, dumped)):
        wanted.append("more calls in each dump (TORCH_FR_BUFFER_SIZE=20000)")
    elif not any(c.site for s in dumped for c in s.collectives):
        wanted.append("dumps with stack traces (pickle, not JSON)")
    if not seen or not all(s.stacks for s in seen):
        wanted.append("`py-spy dump` of every rank while it hangs")
    text = f"Collect {' and '.join(wanted)}." if wanted else ""
    if culprits:
        whose = ranks(culprits)
        their = "its log, its stack" if len(culprits) == 1 else "their logs, their stacks"
        text = f"See what {whose} did instead: {their} while the job hangs. {text}"
    return text.rstrip()


def _written_at_a_timeout(evidence: Evidence) -> list[str]:
    """What the communication library of the job can be told to write when it gives up."""
    libraries = {meaning(one).library for one in evidence.reports} - {""}
    if libraries and not any("NCCL" in one.text for one in evidence.reports):
        # HCCL's own logs hold what each rank waited for; the others write nothing of the kind.
        return ["the plog of every rank (~/ascend/log)"] if "HCCL" in libraries else []
    return [
        "a Flight Recorder dump of every rank (TORCH_FR_BUFFER_SIZE=20000, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
    ]


def _completed(found: Frontier, evidence: Evidence) -> bool:
    call = found.call
    return call is not None and any(
        c.completed
        for rank in found.ahead
        if rank in evidence.ranks
        for c in evidence.ranks[rank].collectives
        if (c.group, c.position) == (call.group, call.position)
    )
