"""Where each device is, when it is known which calls completed, and where Python is.

A program runs ahead of its device: a call returns once it is queued, so a rank that issued one may
not be in it yet, and a stack shows the first line that needed a result. The device runs calls in
order (as far as their streams depend on each other), so it is at the first incomplete
call, and it waits for the members that are elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.schedules.align import POINT_TO_POINT, Aligned, Channel, was_recorded
from moediag.diagnosis.schedules.replay import Event, Replay
from moediag.evidence.model import ISSUED, STARTED_THERE, Collective, Evidence, Group, RankEvidence
from moediag.evidence.rank_stacks import in_collective, waits_for_device
from moediag.records import dataclass


@dataclass(slots=True)
class Standing:
    """Where the devices are."""

    at: dict[int, dict[Event, Collective]] = field(default_factory=dict)
    """Rank -> event -> its call; a batch of sends and receives has several events."""
    blockers: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    """Event -> members that neither reached nor completed it."""
    groups: dict[Event, Group] = field(default_factory=dict)
    unseen: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    """Event -> members of which no calls are known."""
    unplaced: set[int] = field(default_factory=set)
    """Ranks whose first incomplete call cannot be aligned with other ranks' calls."""

    def waiting(self) -> Replay:
        """Which rank waits for which."""
        result = Replay()
        for rank, events in self.at.items():
            for event, call in events.items():
                if self.blockers[event] and rank not in result.waits:
                    result.add(rank, event, call, self.blockers[event], self.groups[event])
        return result

    def roots(self) -> dict[Event, Collective]:
        """Calls that all known members reached and that still do not complete. Whatever else waits,
        waits for these."""
        return {
            event: call
            for events in self.at.values()
            for event, call in events.items()
            if not self.blockers[event]
        }


def standing(aligned: Aligned, evidence: Evidence) -> Standing:
    """Where the devices of ranks with an open call are."""
    found = Standing()
    ends = _ends(aligned.channels)
    for rank, seen in sorted(evidence.ranks.items()):
        found.at[rank] = {}
        for call in _first_open(seen):
            event, group = _event(aligned, ends, rank, call, evidence)
            if call.completed:
                continue
            if event is None or group is None:
                found.unplaced.add(rank)
            else:
                found.at[rank][event] = call
                found.groups[event] = group
    through: dict[Event, set[int]] = defaultdict(set)
    for (rank, _), (event, call, _) in ends.items():
        if call.completed:
            through[event].add(rank)
    there: dict[Event, set[int]] = defaultdict(set)
    for rank, events in found.at.items():
        for event in events:
            there[event].add(rank)
    for event, group in found.groups.items():
        found.blockers[event] = _blockers(aligned, event, there[event] | through[event], evidence)
        members = group.ranks if event[0] in aligned.schedules else event[0][1]
        found.unseen[event] = tuple(r for r in members if not is_known(evidence, r))
    return found


def is_known(evidence: Evidence, rank: int) -> bool:
    """Whether the rank's calls are known."""
    return rank in evidence.ranks and was_recorded(evidence.ranks[rank])


def _first_open(seen: RankEvidence) -> Iterator[Collective]:
    """The rank's first incomplete call; all of a batch of sends and receives. Of calls that only
    pg_status counts (they have no operation) the order is unknown: the first one of each group."""
    first: Collective | None = None
    groups: set[str] = set()
    for call in seen.collectives:
        if first is None:
            if call.completed:
                continue
            first = call
        elif first.op in POINT_TO_POINT:
            if (call.group, call.position) != (first.group, first.position):
                return
        elif first.op:
            return
        elif call.group in groups:
            continue
        groups.add(call.group)
        yield call


Ends = dict[tuple[int, int], tuple[Event, Collective, Channel]]  # (rank, index of the call)


def _ends(channels: list[Channel]) -> Ends:
    """The ends of each channel. The n-th send and the n-th receive are one event; where the
    beginning is lost, any open send meets any open receive."""
    found: Ends = {}
    for channel in channels:
        name = (f"{channel.group.name} point-to-point", (channel.sender, channel.receiver))
        for rank, calls in (
            (channel.sender, channel.sends),
            (channel.receiver, channel.receives),
        ):
            for place, call in enumerate(calls):
                event = name, place if channel.whole else 0
                if channel.whole or not call.completed:
                    found[rank, call.index] = event, call, channel
    return found


def _event(
    aligned: Aligned, ends: Ends, rank: int, call: Collective, evidence: Evidence
) -> tuple[Event | None, Group | None]:
    if call.op in POINT_TO_POINT:
        end = ends.get((rank, call.index))
        if end is not None:
            return end[0], end[2].group
        group = evidence.ranks[rank].groups.get(call.group)
        if call.peer is None or group is None or is_known(evidence, call.peer):
            return None, None
        pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        return ((f"{group.name} point-to-point", pair), 0), group
    event = aligned.event(rank, call)
    return event, aligned.schedules[event[0]].group if event is not None else None


def _blockers(
    aligned: Aligned, event: Event, there: set[int], evidence: Evidence
) -> tuple[int, ...]:
    """Members that neither are ``there`` nor completed it. A hole in a log is no absence."""
    key, position = event
    schedule = aligned.schedules.get(key)
    if schedule is None:  # both ends of a channel
        return tuple(r for r in key[1] if r not in there and is_known(evidence, r))
    found = []
    for rank, start in schedule.starts.items():
        call = schedule.at(rank, position)
        is_hole = call is None and position < schedule.end(rank)
        is_through = schedule.completed(rank, position)
        if start <= position and not (rank in there or is_hole or is_through):
            found.append(rank)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Front:
    """Where Python and the device are on one rank whose device is known."""

    rank: int
    stuck: Collective | None
    """The call that its device runs or has not reached; None where all completed."""
    label: str = ""
    begun: bool = False
    """The device is in that call."""
    timed: bool = False
    """Torch reports when calls begin, so a call without such a report has not begun."""
    behind: int = 0
    """Number of calls that Python issued after it."""
    at: str = ""
    """The line where Python is; "" without a stack."""
    waits: bool = False
    """Python waits for the device."""


def fronts(evidence: Evidence) -> tuple[Front, ...]:
    """One for each rank whose device is known; empty on the CPU or without Flight Recorder."""
    known = [
        s for _, s in sorted(evidence.ranks.items()) if any(c.on_device for c in s.collectives)
    ]
    timed = any(c.on_device == STARTED_THERE for s in known for c in s.collectives)
    return tuple(_front(seen, timed) for seen in known)


def stuck_in(seen: RankEvidence) -> Collective | None:
    """The call that the rank's device runs or has not reached; None where all completed, and where
    its device is not known."""
    open_ = [c for c in seen.collectives if c.on_device in (ISSUED, STARTED_THERE)]
    # Streams run in parallel: a call that began is where the device is, whatever is queued.
    begun = [c for c in open_ if c.on_device == STARTED_THERE]
    return next(iter(begun or open_), None)


def _front(seen: RankEvidence, timed: bool) -> Front:
    stuck = stuck_in(seen)
    label, behind = "", 0
    if stuck is not None:
        label = seen.on(stuck)
        behind = sum(c.index > stuck.index for c in seen.collectives)
    return Front(
        seen.rank, stuck, label, stuck is not None and stuck.on_device == STARTED_THERE, timed,
        behind,
        program_line(seen), waits_for_device(s for s in seen.stacks if not in_collective(s)),
    )  # fmt: skip
