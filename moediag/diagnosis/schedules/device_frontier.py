"""Where each device is, when it is known which calls completed.

A program runs ahead of its device: a rank that issued a call may not be in it yet. The device runs
calls in order (as far as their streams depend on each other), so it is at the first incomplete
call, and it waits for the members that are elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from moediag.diagnosis.schedules.align import POINT_TO_POINT, Aligned, Channel
from moediag.diagnosis.schedules.replay import Event, Replay
from moediag.evidence.model import Collective, Evidence, Group


@dataclass(slots=True)
class Standing:
    """Where the devices are."""

    at: dict[int, dict[Event, Collective]] = field(default_factory=dict)
    """Rank -> event -> its call; a batch of sends and receives has several events."""
    blockers: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    """Event -> members that neither reached nor completed it."""
    groups: dict[Event, Group] = field(default_factory=dict)

    def waiting(self) -> Replay:
        """Which rank waits for which."""
        result = Replay()
        for rank, events in self.at.items():
            for event, call in events.items():
                if self.blockers[event] and rank not in result.waits:
                    result.add(rank, event, call, self.blockers[event], self.groups[event])
        return result

    def roots(self) -> dict[Event, Collective]:
        """Collectives that all members reached and that still do not complete."""
        return {
            event: call
            for events in self.at.values()
            for event, call in events.items()
            if not self.blockers[event] and call.op not in POINT_TO_POINT
        }


def standing(aligned: Aligned, evidence: Evidence) -> Standing:
    """Where the devices of ranks with an open call are."""
    found = Standing()
    ends = _ends(aligned.channels)
    for rank, seen in sorted(evidence.ranks.items()):
        found.at[rank] = {}
        batch: Collective | None = None
        for call in seen.collectives:
            if call.completed and batch is None:
                continue
            if batch is not None and (call.group, call.position) != (batch.group, batch.position):
                break
            event, group = _event(aligned, ends, rank, call)
            if event is not None and group is not None and not call.completed:
                found.at[rank][event] = call
                found.groups[event] = group
            if call.op not in POINT_TO_POINT:
                break
            batch = call
    through: dict[Event, set[int]] = defaultdict(set)
    for (rank, _), (event, call, _) in ends.items():
        if call.completed:
            through[event].add(rank)
    there: dict[Event, set[int]] = defaultdict(set)
    for rank, events in found.at.items():
        for event in events:
            there[event].add(rank)
    for event in found.groups:
        found.blockers[event] = _blockers(aligned, event, there[event] | through[event])
    return found


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
    aligned: Aligned, ends: Ends, rank: int, call: Collective
) -> tuple[Event | None, Group | None]:
    if call.op in POINT_TO_POINT:
        end = ends.get((rank, call.index))
        return (end[0], end[2].group) if end is not None else (None, None)
    event = aligned.event(rank, call)
    return event, aligned.schedules[event[0]].group if event is not None else None


def _blockers(aligned: Aligned, event: Event, there: set[int]) -> tuple[int, ...]:
    """Members that neither are ``there`` nor completed it. A hole in a log is no absence."""
    key, position = event
    schedule = aligned.schedules.get(key)
    if schedule is None:  # both ends of a channel
        return tuple(rank for rank in key[1] if rank not in there)
    found = []
    for rank, start in schedule.starts.items():
        call = schedule.at(rank, position)
        is_hole = call is None and position < schedule.end(rank)
        is_through = call is not None and call.completed
        if start <= position and not (rank in there or is_hole or is_through):
            found.append(rank)
    return tuple(found)
