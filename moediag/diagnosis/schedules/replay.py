"""Replays the schedules to find which rank waits for which, and circles of waiting ranks.

In the replay a rank stops at a collective until all members of its group arrived. An asynchronous
operation, or one known to have completed, stops no rank. Ranks that remain stopped at the end are
really stopped: by a rank that never arrived, or by one that itself waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from moediag.diagnosis.schedules.align import Aligned, Channel, Key, own_calls
from moediag.evidence.model import Collective, Evidence, Group

Event = tuple[Key, int]


@dataclass(slots=True)
class Replay:
    """Which ranks wait, where, and for whom."""

    waits: dict[int, Event] = field(default_factory=dict)
    """Rank -> the event at which it stops."""
    absent: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    """Event -> the ranks that never arrive there. In evidence of other tools also the events of
    calls that were queued behind the one at which a rank stops."""
    calls: dict[int, Collective] = field(default_factory=dict)
    """Rank -> its own call there."""
    groups: dict[Event, Group] = field(default_factory=dict)
    """Event -> its group."""
    there: Mapping[Event, Collection[int]] = field(default_factory=dict)
    """Event of collectives -> the ranks that made the call."""

    def add(
        self, rank: int, event: Event, call: Collective, absent: tuple[int, ...], group: Group
    ) -> None:
        self.waits[rank], self.calls[rank] = event, call
        self.absent[event], self.groups[event] = absent, group


def replay(aligned: Aligned, evidence: Evidence) -> Replay:
    """The replayed state, in linear time in the number of calls."""
    run = _Run(aligned, evidence)
    run.to_the_end()
    result = Replay(there=run.who)
    for rank in run.queues:
        stop = run.stop(rank)
        if stop is not None:
            event, call = stop
            group = aligned.schedules[event[0]].group
            result.add(rank, event, call, run.missing(event), group)
        for event, _ in run.open_later(rank) if evidence.foreign else ():
            result.absent.setdefault(event, run.missing(event))
            result.groups.setdefault(event, aligned.schedules[event[0]].group)
    for channel in aligned.channels:
        if channel.whole:
            _pending(channel, evidence, result)
        else:
            _pending_end(channel, evidence, result)
    return result


def _pending(channel: Channel, evidence: Evidence, result: Replay) -> None:
    """Adds a rank whose last call is an unmatched send or receive. In foreign evidence it need not
    be the last: the program may run ahead of the device."""
    sent, received = len(channel.sends), len(channel.receives)
    if sent == received:
        return
    longer = channel.sends if sent > received else channel.receives
    waiter, peer = channel.sender, channel.receiver
    if received > sent:
        waiter, peer = peer, waiter
    call = longer[min(sent, received)]
    if call.completed:
        return
    if evidence.foreign:
        if waiter in result.waits and result.calls[waiter].index < call.index:
            return
    else:
        later = (c for c in reversed(evidence.ranks[waiter].collectives) if not c.asynchronous)
        last = next(later, call)  # what was issued with the call that it waits for does not count
        # Whoever else a failed rank waited for, this peer came to its end without the call.
        left = evidence.ranks[waiter].error is not None and evidence.ranks[peer].finished
        late = call.asynchronous or last.index != call.index
        if waiter in result.waits or (late and not left):
            return
    _add_pending(channel, waiter, peer, call, min(sent, received), result)


def _pending_end(channel: Channel, evidence: Evidence, result: Replay) -> None:
    """Adds ranks that wait in a channel whose beginning is lost, so calls cannot be counted. But an
    open call waits for its peer, and a peer without any open call is elsewhere."""
    for waiter, peer, calls in (
        (channel.receiver, channel.sender, channel.receives),
        (channel.sender, channel.receiver, channel.sends),
    ):
        open_ = next((call for call in calls if not call.completed), None)
        if open_ is None or any(not c.completed for c in evidence.ranks[peer].collectives):
            continue
        if waiter not in result.waits or open_.index < result.calls[waiter].index:
            _add_pending(channel, waiter, peer, open_, open_.index, result)


def _add_pending(
    channel: Channel, waiter: int, peer: int, call: Collective, place: int, result: Replay
) -> None:
    event = ((f"{channel.group.name} point-to-point", (channel.sender, channel.receiver)), place)
    result.add(waiter, event, call, (peer,), channel.group)


class _Run:
    def __init__(self, aligned: Aligned, evidence: Evidence) -> None:
        self.aligned = aligned
        self.expected: dict[Event, int] = {}
        self.arrived: dict[Event, int] = {}
        self.who: dict[Event, list[int]] = {}
        self.sleeping: dict[Event, list[int]] = {}
        self.at: dict[int, int] = {}
        self.absent: dict[Event, tuple[int, ...]] = {}
        self.queues: dict[int, list[tuple[Event, Collective]]] = {
            rank: [
                (event, call)
                for call in own_calls(seen)
                if (event := aligned.event(rank, call)) is not None
            ]
            for rank, seen in evidence.ranks.items()
        }
        for key, schedule in aligned.schedules.items():
            self._expect(key, schedule.starts, {r: len(c) for r, c in schedule.calls.items()})
        for key, schedule in aligned.schedules.items():
            for rank, calls in schedule.calls.items():
                # A hole in the log: the rank arrived, but its call was not recorded.
                for offset, call in enumerate(calls):
                    if call is None:
                        self._arrive((key, schedule.starts[rank] + offset), rank)

    def _expect(self, key: Key, starts: dict[int, int], lengths: dict[int, int]) -> None:
        """At each position, expects every member whose schedule is known from there or earlier."""
        last = max((starts[r] + lengths[r] for r in starts), default=0)
        first = min(starts.values(), default=0)
        begins = sorted(starts.values())
        known = 0
        for position in range(first, last):
            while known < len(begins) and begins[known] <= position:
                known += 1
            self.expected[key, position] = known

    def _arrive(self, event: Event, rank: int) -> bool:
        """Records the arrival; True when all members are there."""
        self.who.setdefault(event, []).append(rank)
        count = self.arrived[event] = self.arrived.get(event, 0) + 1
        return count >= self.expected.get(event, 0)

    def to_the_end(self) -> None:
        ready = list(self.queues)
        for rank in ready:
            self.at[rank] = 0
        while ready:
            rank = ready.pop()
            queue, at = self.queues[rank], self.at[rank]
            while at < len(queue):
                event, call = queue[at]
                at += 1
                if self._arrive(event, rank):
                    ready += self.sleeping.pop(event, ())
                elif not (call.asynchronous or call.completed):
                    self.sleeping.setdefault(event, []).append(rank)
                    break
            self.at[rank] = at

    def missing(self, event: Event) -> tuple[int, ...]:
        """Members of the group that did not arrive, as far as they are known; at the end."""
        if event not in self.absent:  # all members that wait there ask
            key, position = event
            schedule, there = self.aligned.schedules[key], set(self.who.get(event, ()))
            # Members of a new group wait for each other only.
            made = [schedule.at(rank, position) for rank in there]
            those = {r for call in made if call is not None for r in call.members or ()}
            self.absent[event] = tuple(
                r
                for r, s in schedule.starts.items()
                if s <= position and r not in there and (not those or r in those)
            )
        return self.absent[event]

    def stop(self, rank: int) -> tuple[Event, Collective] | None:
        """Where the rank stopped. A rank that ran to the end of its log may wait for the earliest
        of its asynchronous calls that cannot complete."""
        queue, at = self.queues[rank], self.at[rank]
        if at and rank in self.sleeping.get(queue[at - 1][0], ()):
            return queue[at - 1]
        return next(self.open_later(rank), None)

    def open_later(self, rank: int) -> Iterator[tuple[Event, Collective]]:
        """The rank's calls that cannot complete because members did not come."""
        for event, call in self.queues[rank]:
            if not call.completed and self.arrived.get(event, 0) < self.expected.get(event, 0):
                yield event, call


def circles(run: Replay) -> list[tuple[int, ...]]:
    """Ranks that wait for each other in a circle, in order of waiting, for each circle."""
    found: list[tuple[int, ...]] = []
    visited: set[int] = set()
    for first in run.waits:
        path: list[int] = []
        rank: int | None = first
        while rank is not None and rank not in path and rank not in visited:
            path.append(rank)
            event = run.waits.get(rank)
            absent = run.absent.get(event, ()) if event is not None else ()
            rank = next((r for r in absent if r in run.waits and run.waits[r] != event), None)
        if rank is not None and rank in path:
            found.append(tuple(path[path.index(rank) :]))
        visited.update(path)
    return found
