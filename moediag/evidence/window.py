"""Chooses the calls that the diagnosis needs, on columns of numbers.

Two million calls (1,024 ranks with 2,000 each) would take gigabytes as objects, and nearly all are
alike: all ranks issued the same call at the same position of the same group, and it completed. Few
calls are all kept. Of many, each rank keeps its calls from the first position at which one of its
groups disagrees, waits or ends unevenly, and some before it; earlier calls are then unknown to the
diagnosis, as after a ring buffer has wrapped. A rank with too many of these keeps their beginning
and its end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moediag.evidence.flight_calls import COMPLETED, Dump
from moediag.evidence.group_rows import P2P, Key, Keys, Track, Tracks

KEEP_ALL = 50_000  # calls of all ranks together
BEFORE = 48  # calls of a rank before the first place of interest
MOST = 600_000  # calls of all ranks together that become objects

_DONE = bytes(state == COMPLETED for state in range(256))


@dataclass(slots=True)
class Chosen:
    """The rows to keep, by rank."""

    rows: dict[int, Sequence[int]] = field(default_factory=dict)
    #: For every row of the dump, whether the call completed.
    done: dict[int, bytearray] = field(default_factory=dict)


def choose(dumps: Mapping[int, Dump], keys: Keys, split: Tracks, tracked: bool) -> Chosen:
    """The rows to keep.

    ``keys`` are each rank's groups by the process's own names, ``split`` their calls. ``tracked``:
    the dumps tell which calls completed.
    """
    of_group = _with_empty(dumps, keys, split)
    chosen = Chosen(done={rank: dump.state.translate(_DONE) for rank, dump in dumps.items()})
    for of_rank in of_group.values():
        _complete(dumps, of_rank, chosen.done, tracked)
    if not tracked:
        _complete_pairs(dumps, keys, split.apart, chosen.done)
    every = sum(len(dump.kind) for dump in dumps.values()) <= KEEP_ALL
    start: dict[int, int] = {}
    for of_rank in of_group.values() if not every else ():
        _narrow(of_rank, chosen.done, start)
    for rank, dump in dumps.items():
        total = len(dump.kind)
        rows = range(total) if every else _wanted(dumps, rank, split, start, chosen)
        used = [kind.op in P2P or kind.group in keys[rank] for kind in dump.kinds]
        chosen.rows[rank] = rows if all(used) else [row for row in rows if used[dump.kind[row]]]
    return chosen


def _with_empty(
    dumps: Mapping[int, Dump], keys: Keys, split: Tracks
) -> dict[Key, dict[int, Track]]:
    """The collectives by group and rank, also of members that are known to have made none."""
    found = {key: {**of_rank} for key, of_rank in split.of_group.items()}
    for rank, own in keys.items():
        if dumps[rank].wrapped or not dumps[rank].recording:
            continue
        for key in own.values():
            if key in found and rank not in found[key]:
                found[key][rank] = Track(array("l"), array("l"), 0, 0, True)
    return found


def _complete(
    dumps: Mapping[int, Dump],
    of_rank: Mapping[int, Track],
    done: dict[int, bytearray],
    tracked: bool,
) -> None:
    """Marks calls that must have completed although the dumps do not say so.

    NCCL's calls of one group complete in order. If no dump tells which calls completed, a call that
    all members made counts as completed.
    """
    reached = min(track.end for track in of_rank.values())
    for rank, track in of_rank.items():
        own, dump = done[rank], dumps[rank]
        if not tracked:
            for row in track.rows:
                own[row] = dump.position[row] < reached
        elif dump.backend != "gloo":
            later = False
            for row in reversed(track.rows[_first_open(track.rows, own) :]):
                later = later or bool(own[row])
                own[row] = later


def _first_open(rows: Sequence[int], done: bytearray) -> int:
    """The place in ``rows`` of the first call that did not complete; their number if all did."""
    first = done.find(0)  # of any group: most rows are before it
    begin = bisect_left(rows, first) if first >= 0 else len(rows)
    return next((at for at in range(begin, len(rows)) if not done[rows[at]]), len(rows))


def _complete_pairs(
    dumps: Mapping[int, Dump],
    keys: Keys,
    apart: Mapping[int, Sequence[int]],
    done: dict[int, bytearray],
) -> None:
    """The same for sends and receives: the n-th send completed if there is an n-th receive.

    Once a ring buffer has wrapped they cannot be counted, and all count as completed.
    """
    rows: dict[tuple[Key, tuple[int, int], bool], list[int]] = defaultdict(list)
    for rank, dump in dumps.items():
        for row in apart[rank]:
            kind = dump.kinds[dump.kind[row]]
            key = keys[rank].get(kind.group)
            if key is None or kind.peer is None or kind.peer >= len(key[1]) or dump.wrapped:
                done[rank][row] = True
                continue
            peer = key[1][kind.peer]
            if peer not in dumps or dumps[peer].wrapped:
                done[rank][row] = True
            sends = kind.op == "send"
            ends = (rank, peer) if sends else (peer, rank)
            rows[key, ends, sends].append(row)
    for (key, ends, sends), own in rows.items():
        rank = ends[0] if sends else ends[1]
        for row, _ in zip(own, rows.get((key, ends, not sends), ()), strict=False):
            done[rank][row] = True


def _narrow(
    of_rank: Mapping[int, Track], done: Mapping[int, bytearray], start: dict[int, int]
) -> None:
    """Moves each member's ``start`` back to its first row of interest on this group."""
    place = _interest(of_rank, done)
    if place is None:
        return
    for rank, track in of_rank.items():
        at = max(0, place - track.first) if track.steady else 0
        if at < len(track.rows):
            start[rank] = min(start.get(rank, track.rows[at]), track.rows[at])


def _interest(of_rank: Mapping[int, Track], done: Mapping[int, bytearray]) -> int | None:
    """The first position at which members differ, did not complete or have ended, or None."""
    tracks = list(of_rank.values())
    if any(not track.steady for track in tracks):
        return 0
    places = []
    ends = {track.end for track in tracks}
    if len(ends) > 1:
        places.append(min(ends))
    for rank, track in of_rank.items():
        open_ = _first_open(track.rows, done[rank])
        if open_ < len(track.rows):
            places.append(track.first + open_)
    longest = max(tracks, key=lambda track: len(track.rows))
    for track in tracks:
        low, high = max(track.first, longest.first), min(track.end, longest.end)
        mine = track.signs[low - track.first : high - track.first]
        theirs = longest.signs[low - longest.first : high - longest.first]
        if low < high and mine != theirs:
            differ = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            places.append(low + next(differ))
    return min(places, default=None)


def _wanted(
    dumps: Mapping[int, Dump], rank: int, split: Tracks, start: Mapping[int, int], chosen: Chosen
) -> Sequence[int]:
    """The rows of one rank from somewhat before its first place of interest."""
    share = max(4 * BEFORE, MOST // max(1, len(dumps)))
    total, apart = len(dumps[rank].kind), split.apart[rank]
    open_ = _first_open(apart, chosen.done[rank])
    first = min(start.get(rank, total), apart[open_] if open_ < len(apart) else total)
    first = max(0, first - BEFORE)
    if total - first <= share:
        return range(first, total)
    return [*range(first, first + share // 2), *range(total - share // 2, total)]
