"""Detectors of ranks that raised, died, lost a connection, or were stopped by the guard."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.blame.nodes import open_call, silent
from moediag.diagnosis.end_states import crash_reasons
from moediag.diagnosis.end_states.failures import FATAL_SIGNALS, GUARD, Failure, first_of, said
from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import (
    Judgement,
    apart,
    detector,
    how_sure,
    told_divergence,
    victims,
)
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words import cause, meeting
from moediag.diagnosis.words.calls import describe
from moediag.diagnosis.words.node_sentences import see_node, silence
from moediag.evidence.model import UNTOLD, Evidence
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks


@detector(Verdict.CRASH)
def guard_stop(facts: Facts) -> Judgement | None:
    """The guard (`moediag.recorder.guard`) stopped ranks before a reduction that did not match."""
    if not facts.own or facts.own[0].name != GUARD:
        return None
    found = [failure for failure in facts.own if failure.name == GUARD]
    who = ranks(failure.rank for failure in found)
    d = facts.divergence
    if d is None:
        text = f"The guard stopped {who}: {found[0].summary}"
        return Judgement(Confidence.MEDIUM, text, failure=found[0])
    # The ranks stopped before the divergence had an effect.
    text = cause.of_divergence(d, facts.blame, facts.evidence.backend, died=False, guarded=True)
    earlier = any(call is not None and call.op == "all_gather" for call in d.calls.values())
    when = "at the next reduction" if earlier else "before that reduction"
    return Judgement(
        how_sure(facts),
        f"{text} The guard stopped {who} {when} ({GUARD}).",
        culprits=facts.blame.culprits,
        victims=victims(facts),
        divergence=True,
        failure=found[0],
    )


@detector(Verdict.COLLECTIVE_MISMATCH)
def schedule_mismatch(facts: Facts) -> Judgement | None:
    """Ranks failed, or a recorded job ended, and their schedules do not match.

    An exception of the program decides instead if it came first or no library notices the mismatch.
    """
    found = _mismatch(facts)
    if found is None:
        return None
    return Judgement(
        how_sure(facts),
        told_divergence(facts, found, facts.blame, died=True),
        culprits=facts.blame.culprits,
        victims=victims(facts),
        divergence=True,
    )


def _mismatch(facts: Facts) -> Divergence | None:
    """The divergence that ended the job."""
    d = facts.divergence
    if d is None:
        return None
    own = tuple(failure for failure in facts.own if not _aborted_by_gloo(failure, facts.evidence))
    missing = d.kind == "missing"
    if not facts.failed:
        known = not missing or facts.evidence.watched
        return d if _only_recorded(facts) and known else None
    if missing:  # the others lost the connection to the rank that made no call
        elsewhere = {*d.absent} - {*d.ended} if any(f.gave_up for f in facts.failed) else ()
        return None if own or elsewhere or silent(facts.evidence) else d
    late = own and 0 < own[0].time < d.time
    # A silent divergence does not end a rank. An exception of the program is another failure;
    # an abort by the library is a later consequence of the divergence (sizes then differ too).
    return d if not late and (facts.loud or not own) else None


def _aborted_by_gloo(failure: Failure, evidence: Evidence) -> bool:
    """Whether gloo may have ended a rank that waited in a collective: it aborts where a message is
    longer than its receiver expects. Its own words are in the output, which may be elsewhere."""
    seen = evidence.ranks[failure.rank]
    waits = any(not call.completed and not call.failed for call in seen.collectives)
    silent = failure.name == "SIGABRT" and not failure.message and not seen.last_lines
    return silent and waits and evidence.backend == "gloo"


def _only_recorded(facts: Facts) -> bool:
    """Whether this is a user's own job that ended by itself."""
    evidence = facts.evidence
    stopped = evidence.stall is not None or evidence.timed_out or bool(evidence.launch_error)
    return (evidence.foreign or evidence.watched) and not stopped


@detector(Verdict.CRASH)
def crash(facts: Facts) -> Judgement | None:
    """Ranks raised their own exception, or died. All ranks that failed in the same way as the first
    are culprits, and so are deaths that may have come first. Of ranks that ended without a trace,
    none is named if several did. A rank that failed by itself is never a victim. Of ranks whose
    models DistributedDataParallel found to differ, those unlike most are culprits. Ranks that
    raised over what they received are none, and neither are all ranks of a watched job together."""
    found = tuple(f for f in facts.own if f.rank not in facts.origins) or facts.own
    if not found:
        return None
    leading, ordered = first_of(found, facts.evidence.deaths, facts.evidence.noticed)
    first = leading[0]
    kinds = dict.fromkeys((f.name, f.where) for f in leading)
    alike = {kind: [f for f in found if (f.name, f.where) == kind] for kind in kinds}
    same = tuple(sorted(f.rank for those in alike.values() for f in those))
    text = " ".join(_sentence(those, facts.evidence) for those in alike.values())
    later = [f for f in found if f.rank not in same and (f.message or f.where)]
    if not ordered:
        text += " Not known which of them came first."
    elif later and first.name in FATAL_SIGNALS:
        text += f" Then {_sentence(later[:1], facts.evidence, begins=False)}"
    mixture = crash_reasons.mixed_group(facts.evidence, found)
    text += f" {mixture}" if mixture else ""
    leaders = [failure for those in alike.values() for failure in those]
    unequal = crash_reasons.unequal_models(leaders, facts.evidence.world_size)
    if unequal is not None:
        same, text = unequal[0], f"{text} {unequal[1]}"
    told = facts.origins.get(first.rank)
    if told is not None:
        text += (
            f" What {ranks(same)} received by {told.op} at {told.line} decided that. It is not "
            "known which rank sent it."
        )
    # A launcher that loses a rank ends the others, and then none of them leaves a trace.
    unordered = first.name == UNTOLD and len(same) > 1
    left = facts.divergence
    if left is None or left.kind != "missing" or not set(left.absent) & set(same):
        left = None
    if unordered:
        text += " Not known which ended first: a launcher that loses one rank ends the rest."
    elif left is not None:
        text += f" {_left_waiting(left)}"
    everyone = left is None and _all_would(same, facts.evidence)
    if everyone and told is None and not unordered:
        text += " All ranks did, or were ended before, so none of them is named."
    named = () if unordered or everyone or told is not None else same
    step = "" if unequal is None else crash_reasons.UNEQUAL_NEXT
    if told is not None:
        step = f"Let each rank print what it passes to {told.op} at {told.line}."
    certain = first.message or first.where or left is not None
    return Judgement(
        Confidence.HIGH if certain and ordered and not unordered else Confidence.MEDIUM,
        text,
        culprits=named,
        victims=apart(_others(facts, later), named),
        divergence=left is not None,
        failure=first,
        next_step=step,
    )


def _all_would(same: Sequence[int], evidence: Evidence) -> bool:
    """Whether all ranks of a watched job failed alike, or most did before the others were ended:
    the reason is common to them, as a nan that was averaged into all gradients."""
    ends = [seen.exit for rank, seen in evidence.ranks.items() if rank not in same]
    ended = all(end is not None and end.by_us for end in ends)
    return evidence.watched and 1 < len(same) > len(ends) and ended


def _others(facts: Facts, later: Sequence[Failure]) -> tuple[int, ...]:
    failed = {f.rank for f in later} | {f.rank for f in facts.own if f.name in FATAL_SIGNALS}
    return tuple(rank for rank in facts.evidence.ranks if rank not in failed)


def _sentence(alike: Sequence[Failure], evidence: Evidence, begins: bool = True) -> str:
    who = ranks(f.rank for f in alike)
    text = f"{who.capitalize() if begins else who} {_ended(alike[0], evidence)}"
    if len({f.summary for f in alike}) > 1:
        text = f"{text.rstrip('.')} (the message of {ranks([alike[0].rank])})"
    return text if text.endswith("!") else text.rstrip(".") + "."


def _ended(failure: Failure, evidence: Evidence) -> str:
    if failure.message or failure.where:
        text = f"raised {failure.name}" + (f" at {failure.where}" if failure.where else "")
        text += f", called at {failure.called}" if failure.called else ""
        text += f": {failure.summary}" if failure.summary else ""
        return text + (f" (after {failure.after})" if failure.after else "")
    left = evidence.ranks[failure.rank].left
    if failure.name.startswith("exit code"):
        how = f"by {left.text}" if left is not None else "and left no exception"
        return f"ended with {failure.name} {how}"
    if failure.name == UNTOLD and left is not None:
        return f"ended by {left.text}"
    if failure.name == UNTOLD:
        return "ended without a trace (killed, or by os._exit: the launcher did not record which)"
    killed = _killed(evidence, failure.rank) if failure.name == "SIGKILL" else ""
    return f"died by {failure.name}{killed}"


def _killed(evidence: Evidence, rank: int) -> str:
    if any("Out Of Memory" in one.text and rank in one.about for one in evidence.reports):
        return " (out of memory, as its scheduler says)"
    kills = evidence.oom_kills
    if kills:
        times = "once" if kills == 1 else f"{kills} times"
        return f" (out of memory: the kernel's OOM killer ran {times} meanwhile)"
    if kills == 0:
        return " (killed from outside: the kernel's OOM killer did not run)"
    return " (killed from outside, or out of memory)"


def _left_waiting(left: Divergence) -> str:
    """Which ranks wait for a call of the ranks that failed."""
    calls = {rank: call for rank, call in left.calls.items() if call is not None}
    where = describe(next(iter(calls.values())))
    return f"{ranks(calls).capitalize()} then waited in {where} on {left.group.label}."


@detector(Verdict.CRASH)
def lost_node(facts: Facts) -> Judgement | None:
    """Ranks lost the connection to a peer, and a node stopped sending data."""
    nodes = silent(facts.evidence) if facts.failed else ()
    if not nodes:
        return None
    failed = tuple(sorted(f.rank for f in facts.failed))
    return Judgement(
        Confidence.MEDIUM,
        f"{ranks(failed).capitalize()} lost the connection to a peer ({said(facts.failed)}). "
        f"{silence(nodes)} It went down or was disconnected; the evidence does not show which.",
        culprits=facts.silent_ranks,
        victims=apart(tuple(facts.evidence.ranks), facts.silent_ranks),
        failure=facts.failed[0],
        pattern="silent-node",
        next_step=see_node(nodes),
    )


def _came_late(facts: Facts) -> tuple[int, ...]:
    """Ranks whose call began after others had given up waiting in it; () if more came late than
    gave up. In its call before that one a rank may have waited for ranks of another group, so both
    must be on one group."""
    calls = {r: c for r in facts.evidence.ranks if (c := open_call(facts.evidence, r)) is not None}
    awaited = {
        (calls[f.rank].group, calls[f.rank].position): f.time
        for f in facts.failed
        if f.gave_up and f.rank in calls
    }
    found = []
    for rank, call in calls.items():
        before = [c for c in facts.evidence.ranks[rank].collectives if c.index < call.index][-1:]
        late = 0 < awaited.get((call.group, call.position), call.time) < call.time
        found += [rank] if late and all(c.group == call.group for c in before) else []
    return tuple(found) if len(found) <= sum(f.gave_up for f in facts.failed) else ()


_FIND_THE_FIRST = (
    "Find the rank that ended first; its peers lost the connection to it. Look at the last output "
    "of every rank, the messages of the launcher and the scheduler, and the kernel's log."
)
_LATE = (
    "Find out what {} did when the others gave up. If that just takes long, raise the timeout of "
    "init_process_group."
)


@detector(Verdict.CRASH)
def lost_connection(facts: Facts) -> Judgement | None:
    """Ranks lost the connection to a peer, and the evidence does not show why."""
    found = facts.failed
    if not found:
        return None
    evidence, d, gave_up = facts.evidence, facts.divergence, [f for f in found if f.gave_up]
    if d is not None and d.kind == "missing" and gave_up:
        late = facts.blame.culprits
        text = cause.of_divergence(d, facts.blame, evidence.backend, died=True)
        text = f"{text} {whereabouts(evidence, late)}".rstrip()
    else:
        late = _came_late(facts)
        calls = (describe(c) for r in late if (c := open_call(evidence, r)) is not None)
        text = f"{ranks(late).capitalize()} reached {next(calls, 'a call')} too late."
    if late:
        who = ranks(f.rank for f in gave_up).capitalize()
        return Judgement(
            Confidence.MEDIUM,
            f"{text} {who} gave up ({said(gave_up)}).",
            culprits=late,
            victims=apart(tuple(evidence.ranks), late),
            divergence=d is not None,
            failure=gave_up[0],
            next_step=_LATE.format(ranks(late)),
        )
    text = f"{ranks(f.rank for f in found).capitalize()} lost the connection to a peer "
    errors = [evidence.ranks[f.rank].error for f in found]
    if all(error is not None and meeting.is_meeting(error.frames) for error in errors) and (
        old := meeting.old_store(facts.evidence)
    ):
        text += f"in init_process_group ({said(found)}). {old}"
        return Judgement(Confidence.MEDIUM, text, failure=found[0], next_step=meeting.OWN_PREFIX)
    text += f"({said(found)}); the evidence shows neither why nor which rank is at fault."
    return Judgement(Confidence.LOW, text, failure=found[0], next_step=_FIND_THE_FIRST)
