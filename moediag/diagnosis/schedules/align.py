"""Aligns the ranks' schedules by the group's identity and the position in the group's schedule.

A rank's counter of all calls is never compared between ranks: ranks belong to different groups and
issue different numbers of point-to-point calls. A group is its name *and* its ranks. If the ring
buffer lost the beginning of a rank's log, the rank is aligned by the recorded positions. Before its
first one it is *unknown*, not absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moediag.evidence.model import Collective, Evidence, Group, RankEvidence

POINT_TO_POINT = frozenset({"send", "recv"})
Key = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Schedule:
    """The collectives of one group by rank. Ranks with an unknown schedule are left out."""

    group: Group
    starts: dict[int, int] = field(default_factory=dict)  # rank -> position of its first call
    calls: dict[int, list[Collective | None]] = field(default_factory=dict)  # None: hole in the log
    settled: set[int] = field(
        default_factory=set
    )  # ranks that completed all calls before their first

    def end(self, rank: int) -> int:
        """The first position that ``rank`` did not reach."""
        return self.starts[rank] + len(self.calls[rank])

    def completed(self, rank: int, position: int) -> bool:
        """Whether ``rank`` is known to have completed the call, recorded or not."""
        call = self.at(rank, position)
        early = rank in self.settled and position < self.starts[rank]
        return early or (call is not None and call.completed)

    def at(self, rank: int, position: int) -> Collective | None:
        """The call; None if it is unknown or was not made."""
        offset = position - self.starts[rank]
        calls = self.calls[rank]
        return calls[offset] if 0 <= offset < len(calls) else None


@dataclass(slots=True)
class Channel:
    """Point-to-point calls from ``sender`` to ``receiver`` on one group, each side in order."""

    group: Group
    sender: int
    receiver: int
    tag: int = 0
    """0 also for a backend that ignores tags."""
    sends: list[Collective] = field(default_factory=list)
    receives: list[Collective] = field(default_factory=list)
    whole: bool = True
    """Both sides are known from the beginning, so the n-th send meets the n-th receive."""

    @property
    def ends(self) -> tuple[str, int, int, int]:
        """What no other channel has."""
        return self.group.name, self.sender, self.receiver, self.tag


@dataclass(slots=True)
class Aligned:
    """The schedules of all groups, and all channels."""

    schedules: dict[Key, Schedule] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)
    key_of: dict[tuple[int, str], Key] = field(default_factory=dict)  # (rank, group name)
    # (rank, index) -> position without point-to-point calls, where it differs from the recorded one
    renumbered: dict[tuple[int, int], int] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()

    def event(self, rank: int, call: Collective) -> tuple[Key, int] | None:
        """The call's group and position; None for a call that is not aligned."""
        key = self.key_of.get((rank, call.group))
        if key is None or call.op in POINT_TO_POINT or rank not in self.schedules[key].starts:
            return None
        return key, self.renumbered.get((rank, call.index), call.position)


def align(evidence: Evidence) -> Aligned:
    """The aligned schedules, in near linear time in the number of calls."""
    aligned = Aligned()
    lost: list[str] = []
    by_name = _groups_by_name(evidence)
    calls: dict[Key, dict[int, list[Collective]]] = defaultdict(dict)
    for rank, seen in evidence.ranks.items():
        by_group: dict[str, list[Collective]] = defaultdict(list)
        for call in own_calls(seen):
            by_group[call.group].append(call)
        for name, own in by_group.items():
            group = _resolve(name, rank, seen, by_name)
            aligned.key_of[rank, name] = _key(group)
            aligned.schedules.setdefault(_key(group), Schedule(group))
            calls[_key(group)][rank] = own
    for key, schedule in aligned.schedules.items():
        schedule.group = _complete(schedule.group, calls[key], by_name)
        members = schedule.group.ranks or tuple(sorted(calls[key]))
        for rank in members:
            seen_rank = evidence.ranks.get(rank)
            if seen_rank is None or not was_recorded(seen_rank):
                continue
            _place(aligned, schedule, rank, calls[key].get(rank, []), seen_rank, lost)
        aligned.channels += _channels(schedule.group, calls[key], evidence)
    aligned.not_seen = tuple(dict.fromkeys(lost))
    return aligned


def further(group: Group, rank: int, peer: int) -> int:
    """How many positions after ``rank`` its ``peer`` comes in the group, around its end."""
    return (group.ranks.index(peer) - group.ranks.index(rank)) % len(group.ranks)


def own_calls(seen: RankEvidence) -> Iterable[Collective]:
    """The rank's calls up to the exception that ended it. Calls of its clean-up (a barrier, a last
    metric) belong to no schedule."""
    if seen.error is None or seen.error.time <= 0:
        return seen.collectives
    return [call for call in seen.collectives if call.time <= seen.error.time]


def was_recorded(seen: RankEvidence) -> bool:
    """Whether this rank's recorder left anything: then a call missing in its log was not made."""
    return bool(seen.collectives or seen.groups or seen.versions or seen.last_phase)


def lost_prefix(seen: RankEvidence) -> bool:
    """Whether the beginning of the log is lost, because the ring buffer wrapped."""
    return bool(seen.collectives) and seen.collectives[0].index > 0


def _key(group: Group) -> Key:
    return group.name, group.ranks


def _groups_by_name(evidence: Evidence) -> dict[str, list[Group]]:
    found: dict[str, dict[tuple[int, ...], Group]] = defaultdict(dict)
    for seen in evidence.ranks.values():
        for name, group in seen.groups.items():
            known = found[name].get(group.ranks)
            if known is None or (known.axis is None and group.axis):
                found[name][group.ranks] = group
    return {name: list(by_ranks.values()) for name, by_ranks in found.items()}


def _resolve(name: str, rank: int, seen: RankEvidence, by_name: Mapping[str, list[Group]]) -> Group:
    """The group that the rank recorded, else the only one of that name with this rank, else an
    unknown group."""
    if name in seen.groups and seen.groups[name].ranks:
        return seen.groups[name]
    having = [g for g in by_name.get(name, ()) if rank in g.ranks]
    return having[0] if len(having) == 1 else Group(name, ())


def _complete(
    group: Group, callers: Mapping[int, object], by_name: Mapping[str, list[Group]]
) -> Group:
    """The group with the axis that any of its ranks recorded; its callers replace unknown ranks."""
    if not group.ranks:
        return replace(group, ranks=tuple(sorted(callers)))
    return next((g for g in by_name.get(group.name, ()) if g.ranks == group.ranks), group)


def _place(
    aligned: Aligned,
    schedule: Schedule,
    rank: int,
    own: list[Collective],
    seen: RankEvidence,
    lost: list[str],
) -> None:
    """Puts one rank's calls of one group at their positions."""
    if seen.counts_apart:
        own = [call for call in own if call.op not in POINT_TO_POINT]
    if seen.open_only or schedule.group.name in seen.settled:
        schedule.settled.add(rank)
    if not own:
        if schedule.group.name in seen.settled or not lost_prefix(seen):
            schedule.starts[rank] = seen.settled.get(schedule.group.name, 0)
            schedule.calls[rank] = []
        return
    contiguous = own[-1].position - own[0].position == len(own) - 1
    paired = any(call.op in POINT_TO_POINT for call in own)
    if paired:
        # Positions also count point-to-point calls, whose number may differ between ranks.
        if own[0].position > 0 or not contiguous:
            lost.append(
                f"rank {rank}: collectives on {schedule.group.label} (part of the log is gone, "
                "and with point-to-point calls between them they cannot be aligned)"
            )
            return
        collectives = [call for call in own if call.op not in POINT_TO_POINT]
        for position, call in enumerate(collectives):
            aligned.renumbered[rank, call.index] = position
        schedule.starts[rank], schedule.calls[rank] = 0, list(collectives)
        return
    first = own[0].position
    schedule.starts[rank] = first
    if contiguous:
        schedule.calls[rank] = list(own)
        return
    placed: list[Collective | None] = [None] * (max(c.position for c in own) - first + 1)
    for call in own:
        if call.position >= first:
            placed[call.position - first] = call
    schedule.calls[rank] = placed


def _channels(
    group: Group, calls: Mapping[int, Iterable[Collective]], evidence: Evidence
) -> list[Channel]:
    """Both ends of each channel. A receive from any source hides every channel to that rank. A
    channel that lost its beginning on either side counts only in foreign evidence, where the calls
    show whether they completed."""
    found: dict[tuple[int, int, int], Channel] = {}
    tagged = "nccl" not in (group.backend or evidence.backend)
    unknowable: set[int] = set()
    for rank, own in calls.items():
        for call in own:
            if call.op not in POINT_TO_POINT:
                continue
            if call.peer is None:
                unknowable.add(rank)
                continue
            ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            at = *ends, call.tag if tagged else 0
            channel = found.get(at) or found.setdefault(at, Channel(group, *at))
            (channel.sends if call.op == "send" else channel.receives).append(call)
    known = []
    for (sender, receiver, _), channel in found.items():
        ends_seen = [evidence.ranks.get(rank) for rank in (sender, receiver)]
        if receiver in unknowable or not all(s is not None and was_recorded(s) for s in ends_seen):
            continue
        channel.whole = not any(s is not None and lost_prefix(s) for s in ends_seen)
        if channel.whole or evidence.foreign:
            known.append(channel)
    return known
