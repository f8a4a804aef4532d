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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moediag.evidence.flight_calls import COMPLETED, Dump

KEEP_ALL = 50_000  # calls of all ranks together
BEFORE = 48  # calls of a rank before the first place of interest
MOST = 600_000  # calls of all ranks together that become objects

Key = tuple[str, tuple[int, ...]]  # a group: its shared name and its members
_UNEVEN = ("all_to_all", "gather", "scatter")  # sizes may differ between ranks
_P2P = ("send", "recv")


@dataclass(slots=True)
class Chosen:
    """The rows to keep, by rank."""

    rows: dict[int, Sequence[int]] = field(default_factory=dict)
    #: For every row of the dump, whether the call completed.
    done: dict[int, bytearray] = field(default_factory=dict)


@dataclass(slots=True)
class _Track:
    """The collectives of one rank on one group."""

    #: Of its dump.
    rows: array[int]
    #: Equal for equal calls of any rank.
    signs: array[int]
    #: First position.
    first: int
    end: int
    #: Each position follows the one before.
    steady: bool


def choose(
    dumps: Mapping[int, Dump], keys: Mapping[int, Mapping[str, Key]], tracked: bool
) -> Chosen:
    """The rows to keep.

    ``keys`` are each rank's groups by the process's own names; collectives on other groups have no
    usable position and are left out. ``tracked``: the dumps tell which calls completed.
    """
    tracks: dict[Key, dict[int, _Track]] = defaultdict(dict)
    apart: dict[int, list[int]] = {}  # rows of sends and receives
    signs: dict[tuple[str, int, int, str], int] = {}
    for rank, dump in dumps.items():
        apart[rank] = _split(rank, dump, keys[rank], signs, tracks)
    _empty(dumps, keys, tracks)
    chosen = Chosen()
    for rank, dump in dumps.items():
        chosen.done[rank] = bytearray(state == COMPLETED for state in dump.state)
    for of_rank in tracks.values():
        _complete(dumps, of_rank, chosen.done, tracked)
    if not tracked:
        _complete_pairs(dumps, keys, apart, chosen.done)
    rows = {rank: [*own] for rank, own in apart.items()}
    for of_rank in tracks.values():
        for rank, track in of_rank.items():
            rows[rank] += track.rows
    if sum(len(dump.kind) for dump in dumps.values()) <= KEEP_ALL:
        for rank in dumps:
            chosen.rows[rank] = sorted(rows[rank])
        return chosen
    start: dict[int, int] = {}
    for of_rank in tracks.values():
        _narrow(of_rank, chosen.done, start)
    _keep(dumps, rows, apart, start, chosen)
    return chosen


def _split(
    rank: int,
    dump: Dump,
    keys: Mapping[str, Key],
    signs: dict[tuple[str, int, int, str], int],
    tracks: dict[Key, dict[int, _Track]],
) -> list[int]:
    """Sorts the rows of one dump by group; returns those of sends and receives."""
    by_group: dict[str, array[int]] = {}
    apart: list[int] = []
    of_kind: list[array[int] | None] = []
    sign = array("l")
    for kind in dump.kinds:
        if kind.op in _P2P:
            of_kind.append(None)
            sign.append(-1)
            continue
        of_kind.append(by_group.setdefault(kind.group, array("l")))
        sizes = (0, 0) if kind.op in _UNEVEN else (kind.numel_in, kind.numel_out)
        sign.append(signs.setdefault((kind.op, *sizes, kind.dtype), len(signs)))
    for row, number in enumerate(dump.kind):
        rows = of_kind[number]
        if rows is None:
            apart.append(row)
        else:
            rows.append(row)
    for group, rows in by_group.items():
        if group in keys and rows:
            first, last = dump.position[rows[0]], dump.position[rows[-1]]
            tracks[keys[group]][rank] = _Track(
                rows,
                array("l", [sign[dump.kind[row]] for row in rows]),
                first,
                last + 1,
                last - first == len(rows) - 1,
            )
    return apart


def _empty(
    dumps: Mapping[int, Dump],
    keys: Mapping[int, Mapping[str, Key]],
    tracks: dict[Key, dict[int, _Track]],
) -> None:
    """Adds the members that are known to have made no call on a group."""
    for rank, own in keys.items():
        if dumps[rank].wrapped or not dumps[rank].recording:
            continue
        for key in own.values():
            if key in tracks and rank not in tracks[key]:
                tracks[key][rank] = _Track(array("l"), array("l"), 0, 0, True)


def _complete(
    dumps: Mapping[int, Dump],
    of_rank: Mapping[int, _Track],
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
            for row in reversed(track.rows):
                later = later or bool(own[row])
                own[row] = later


def _complete_pairs(
    dumps: Mapping[int, Dump],
    keys: Mapping[int, Mapping[str, Key]],
    apart: Mapping[int, list[int]],
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
    of_rank: Mapping[int, _Track], done: Mapping[int, bytearray], start: dict[int, int]
) -> None:
    """Moves each member's ``start`` back to its first row of interest on this group."""
    place = _interest(of_rank, done)
    if place is None:
        return
    for rank, track in of_rank.items():
        at = max(0, place - track.first) if track.steady else 0
        if at < len(track.rows):
            start[rank] = min(start.get(rank, track.rows[at]), track.rows[at])


def _interest(of_rank: Mapping[int, _Track], done: Mapping[int, bytearray]) -> int | None:
    """The first position at which members differ, did not complete or have ended, or None."""
    tracks = list(of_rank.values())
    if any(not track.steady for track in tracks):
        return 0
    places = []
    ends = {track.end for track in tracks}
    if len(ends) > 1:
        places.append(min(ends))
    for rank, track in of_rank.items():
        own = done[rank]
        open_ = next((i for i, row in enumerate(track.rows) if not own[row]), None)
        if open_ is not None:
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


def _keep(
    dumps: Mapping[int, Dump],
    rows: Mapping[int, list[int]],
    apart: Mapping[int, list[int]],
    start: Mapping[int, int],
    chosen: Chosen,
) -> None:
    share = max(4 * BEFORE, MOST // max(1, len(dumps)))
    for rank, dump in dumps.items():
        total, own = len(dump.kind), chosen.done[rank]
        open_ = next((row for row in apart[rank] if not own[row]), total)
        first = max(0, min(start.get(rank, total), open_) - BEFORE)
        if total - first > share:
            wanted = {*range(first, first + share // 2), *range(total - share // 2, total)}
        else:
            wanted = {*range(first, total)}
        chosen.rows[rank] = sorted(row for row in rows[rank] if row in wanted)
