"""Finds the first divergence of a trial: the earliest place where the ranks disagree.

Each group gives at most one candidate where calls that meet do not match. The replay
(:mod:`replay`) gives those where a call is missing and those where ranks wait in a circle. The
first is the one that no other precedes on any rank; of several independent ones, the earliest by
the clock. Dumps of other jobs often show several faults at once, so the others count there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field

from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.schedules import matching
from moediag.diagnosis.schedules.align import Aligned, Channel, Schedule
from moediag.diagnosis.schedules.device_frontier import standing
from moediag.diagnosis.schedules.replay import Event, Replay, circles
from moediag.evidence.model import Collective, Evidence, Group, Left, RankEvidence
from moediag.evidence.rank_stacks import in_collective, that_counts
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where the ranks' schedules disagree."""

    kind: str
    """One of matching.KINDS, ``missing`` (a rank made no call where others wait), ``order`` (ranks
    wait for each other in calls of different groups), ``peer`` or ``transfer`` (a rank sends to
    another peer, or more or less often, than the others: :mod:`transfers`)."""
    group: Group
    position: int
    calls: Mapping[int, Collective | None]
    """Each rank's call; None where it made none. Ranks without a known schedule are left out."""
    absent: tuple[int, ...] = ()
    """For ``missing``: ranks that ended or are elsewhere."""
    ended: tuple[int, ...] = ()
    """The absent ranks that finished normally."""
    left: Mapping[int, Left] = field(default_factory=dict)
    """Where the program ended those of ``ended`` by a call, if the evidence shows it."""
    pairs: tuple[tuple[int, int], ...] = ()
    """For ``splits``: (sender, receiver)."""
    events: Mapping[int, Event] = field(default_factory=dict)
    """For ``order``: the event of the circle to which each rank came first."""
    groups: tuple[Group, ...] = ()
    """For ``order``: the groups of the circle."""
    batched: bool = False
    """For ``order``: all ranks wait in one line, which makes both sends and receives."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """For ``missing`` in a job that ended: each rank's number of calls on the group. For
    ``transfer``: those of the two ranks from their lines in that step."""
    inferred: bool = False
    """No rank was seen elsewhere; the dumps of the absent ranks only show no open call."""
    waiting: int = 0
    """How many ranks of the job wait, here or elsewhere."""
    waiters: tuple[int, ...] = ()
    """For ``missing``: the ranks that wait for one of the absent ranks, in any group."""
    odd: int | None = None
    """For ``peer`` and ``transfer``: the rank that departs, if that is known."""
    agreeing: tuple[int, ...] = ()
    """The ranks from which it departs."""
    surplus: bool = False
    """For ``missing``: the call met another one of the absent ranks (:mod:`surplus`)."""

    @property
    def silent(self) -> bool:
        """Whether the same bytes travel, so that no library can notice."""
        return self.kind == "parameters"

    @property
    def time(self) -> float:
        return min((c.time for c in self.calls.values() if c is not None), default=math.inf)


def divergences(
    aligned: Aligned, run: Replay, evidence: Evidence, failed: Iterable[Failure]
) -> tuple[Divergence, ...]:
    """The first divergence, and in evidence of other tools the others by time; () if the logs show
    none."""
    candidates = [d for s in aligned.schedules.values() if (d := _mismatch(s)) is not None]
    whole = (c for c in aligned.channels if c.whole)
    candidates += [d for c in whole if (d := _channel_mismatch(c, evidence)) is not None]
    failures = {f.rank: f for f in failed}
    candidates += _left_over(aligned, evidence, failures) or _missing(
        aligned, run, evidence, failures
    )
    if not candidates or evidence.foreign:
        candidates += _order(run, candidates, evidence)
    known = evidence.foreign or evidence.devices_known
    if not candidates and known and evidence.stall is not None:
        # Every call was issued and none completes: only the devices wait in a circle.
        candidates += _order(standing(aligned, evidence).waiting(), (), evidence)
    first = _first(candidates)
    if not evidence.foreign:
        return first
    return (*first, *sorted((one for one in candidates if one not in first), key=_order_of))


def earliest(candidates: Iterable[Divergence]) -> dict[int, float]:
    """By rank, the first of its calls that is part of a candidate."""
    earliest: dict[int, float] = {}
    for candidate in candidates:
        for rank, call in candidate.calls.items():
            index = math.inf if call is None else call.index
            earliest[rank] = min(earliest.get(rank, math.inf), index)
    return earliest


def _first(candidates: list[Divergence]) -> tuple[Divergence, ...]:
    begin = earliest(candidates)
    minimal = [
        candidate
        for candidate in candidates
        if all(
            (math.inf if call is None else call.index) <= begin[rank]
            for rank, call in candidate.calls.items()
        )
    ]
    return tuple(sorted(minimal or candidates, key=_order_of)[:1])


def _order_of(one: Divergence) -> tuple[float, int, str]:
    return one.time, one.position, one.group.name


# ------------------------------------------------------------------------ calls that do not fit


def _mismatch(schedule: Schedule) -> Divergence | None:
    """The first position where the calls of the ranks that made one do not match."""
    ranks = list(schedule.calls)
    if len(ranks) < 2:
        return None
    low = min(schedule.starts.values())
    high = max(schedule.end(rank) for rank in ranks)
    rows = []
    for rank in ranks:
        before, after = schedule.starts[rank] - low, high - schedule.end(rank)
        keys = [None if c is None else matching.key(c) for c in schedule.calls[rank]]
        rows.append([None] * before + keys + [None] * after)
    order = schedule.group.ranks
    for offset, column in enumerate(zip(*rows, strict=True)):
        some = column[0]
        alike = some is not None and column.count(some) == len(column)
        # Equal splits need not pair, so all-to-all is always checked.
        if alike and not (some[0] == "all_to_all" and (some[-1] or some[-2])):
            continue
        calls = {
            rank: call for rank in ranks if (call := schedule.at(rank, low + offset)) is not None
        }
        if len(calls) < 2:
            continue
        kind = matching.differs(calls, order)
        if kind is not None:
            pairs = tuple(matching.mismatched_pairs(calls, order)) if kind == "splits" else ()
            return Divergence(kind, schedule.group, low + offset, calls, pairs=pairs)
    return None


def _channel_mismatch(channel: Channel, evidence: Evidence) -> Divergence | None:
    gloo = evidence.backend == "gloo" and not evidence.foreign  # dumps may lack the earlier calls
    pairs = list(zip(channel.sends, channel.receives, strict=False))
    sizes = [(matching.wire_numel(send), matching.wire_numel(receive)) for send, receive in pairs]
    equal = {
        (send.site, receive.site)
        for (send, receive), (sent, room) in zip(pairs, sizes, strict=True)
        if sent == room
    }
    for (send, receive), (sent, room) in zip(pairs, sizes, strict=True):
        kind = None
        # gloo fills the beginning of a larger buffer, which a program may always give it.
        larger = gloo and receive.completed and sent < room
        if sent != room and not (larger and (send.site, receive.site) not in equal):
            kind = "size"
        elif send.dtype and receive.dtype and send.dtype != receive.dtype:
            kind = "dtype"
        if kind is not None:
            calls = {channel.sender: send, channel.receiver: receive}
            return Divergence(kind, channel.group, send.position, calls)
    return None


# ------------------------------------------------------------------------ calls never made


def _missing(
    aligned: Aligned, run: Replay, evidence: Evidence, failed: Mapping[int, Failure]
) -> list[Divergence]:
    """Collectives in which ranks wait for one that ended or is elsewhere. A rank that waits
    itself, or was ended with the others, was merely behind."""
    found = []
    for event, absent in run.absent.items():
        gone = tuple(
            rank
            for rank in absent
            if rank not in run.waits and _gone(evidence.ranks[rank], failed, evidence)
        )
        if not gone:
            continue
        key, position = event
        calls: dict[int, Collective | None] = dict.fromkeys(gone)
        schedule = aligned.schedules.get(key)
        if schedule is None:  # point-to-point
            calls |= {rank: run.calls[rank] for rank, at in run.waits.items() if at == event}
            if len(calls) == len(gone):
                continue  # ranks that waited there wait at an earlier call as well
            position = next(c.position for c in calls.values() if c is not None)
        else:
            there = ((rank, schedule.at(rank, position)) for rank in schedule.calls)
            calls |= {rank: call for rank, call in there if call is not None}
        elsewhere = evidence.stall.elsewhere if evidence.stall is not None else ()
        ended = tuple(
            rank
            for rank in gone
            if rank not in elsewhere and rank not in failed and evidence.ranks[rank].ended_well
        )
        group = run.groups[event]
        waiting = len(evidence.stall.waiting) if evidence.stall is not None else 0
        without = {at for at, absent in run.absent.items() if not {*gone}.isdisjoint(absent)}
        waiters = [rank for rank, at in run.waits.items() if at in without]
        found.append(
            Divergence(
                "missing", group, position, calls, gone, ended, _left(ended, evidence),
                inferred=evidence.foreign, waiting=waiting, waiters=tuple(sorted(waiters)),
            )
        )  # fmt: skip
    return found


# What a recorder notes when calls may be absent from its log although they were made.
_LOST = ("the recorder failed", "events were lost", "unreadable")


def _left_over(
    aligned: Aligned, evidence: Evidence, failed: Mapping[int, Failure]
) -> list[Divergence]:
    """Calls that some ranks of a group made and others did not, where all of them ended: then
    no rank waits, because the program ignored that the call failed or the call needs no answer."""
    if evidence.foreign or evidence.stall is not None:
        return []
    found = []
    for schedule in aligned.schedules.values():
        counts = {rank: schedule.end(rank) for rank in schedule.starts}
        ends = [evidence.ranks[rank] for rank in counts]
        if not all(seen.ended_well and seen.rank not in failed for seen in ends) or any(
            lost in text for seen in ends for text in seen.not_seen for lost in _LOST
        ):
            continue
        position = min(counts.values(), default=0)
        absent = tuple(rank for rank, count in counts.items() if count == position)
        if len(absent) == len(counts):
            continue
        calls = {
            rank: None if rank in absent else schedule.at(rank, max(position, start))
            for rank, start in schedule.starts.items()
        }
        # A job that ended waited for no group.
        made = [call for call in calls.values() if call is not None]
        if made and made[0].members is None:
            found.append(
                Divergence(
                    "missing",
                    schedule.group,
                    position,
                    calls,
                    absent,
                    absent,
                    _left(absent, evidence),
                    counts=counts,
                )
            )
    return found


def _gone(seen: RankEvidence, failed: Mapping[int, Failure], evidence: Evidence) -> bool:
    """Whether the rank certainly makes no further call, and not because other ranks failed; or it
    did something else when others gave up waiting."""
    failure = failed.get(seen.rank)
    if failure is not None:
        return not failure.consequence
    elsewhere = evidence.stall.elsewhere if evidence.stall is not None else ()
    if seen.ended_well or seen.rank in elsewhere:
        return True
    stack = that_counts(seen.stacks)
    late = evidence.watched and evidence.stall is None and any(f.gave_up for f in failed.values())
    return late and stack is not None and not in_collective(stack)


def _left(ended: Iterable[int], evidence: Evidence) -> dict[int, Left]:
    known = ((rank, evidence.ranks[rank].left) for rank in ended)
    return {rank: left for rank, left in known if left is not None}


# ------------------------------------------------------------------------ waiting in a circle


def _order(run: Replay, others: Iterable[Divergence], evidence: Evidence) -> list[Divergence]:
    """Circles of waiting ranks, unless one of these ranks also waits for a rank that is nowhere."""
    gone = {rank for other in others for rank in other.absent}
    rings = [
        ring
        for ring in circles(run)
        if not any(gone & set(run.absent[run.waits[rank]]) for rank in ring)
    ]
    return [_circle(run, ring, evidence) for ring in rings]


def _circle(run: Replay, ring: tuple[int, ...], evidence: Evidence) -> Divergence:
    events = {run.waits[rank] for rank in ring}
    waiting = {rank: event for rank, event in run.waits.items() if event in events}
    counts = {event: sum(at == event for at in waiting.values()) for event in events}
    main = max(events, key=lambda event: (counts[event], -min(_at(waiting, event))))
    calls = {rank: run.calls[rank] for rank in sorted(waiting)}
    # Who is no member of a new group has made that call and gone on.
    came = {
        rank: next((e for e in sorted(events) if e != at and rank in run.there.get(e, ())), at)
        for rank, at in waiting.items()
    }
    position = run.calls[min(_at(waiting, main))].position
    lines = {call.site for call in calls.values() if call.op in ("send", "recv") and call.site}
    made = (one for rank in calls for one in evidence.ranks[rank].collectives)
    ops = {one.op for one in made if one.site in lines}
    return Divergence(
        "order",
        run.groups[main],
        position,
        calls,
        events=came,
        groups=tuple(run.groups[event] for event in sorted(events)),
        batched=len(lines) == 1 and len(ops) > 1,
    )


def _at(waiting: Mapping[int, Event], event: Event) -> list[int]:
    return [rank for rank, at in waiting.items() if at == event]
