"""The rows of many dumps by group: the collectives of each rank on each group, in order; how far
each rank got on each group, and which dumps are older than others.

Ranks in the same place of a job issue the same calls, so their dumps often have equal columns.
These are sorted once, and share their result.

A call that needs all members completes nowhere before all of them issued it, and the calls of a
group run in order. So if call 8 completed anywhere, every member has completed call 7, and a dump
that shows otherwise was written earlier: the job still moved.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field

from moediag.evidence.flight_calls import COMPLETED, Dump
from moediag.evidence.model import Group
from moediag.records import dataclass

Key = tuple[str, tuple[int, ...]]  # a group: its shared name and its members
Keys = Mapping[int, Mapping[str, Key]]  # rank -> its own name of a group -> the group
P2P = ("send", "recv")
_UNEVEN = ("all_to_all", "gather", "scatter")  # sizes may differ between ranks
# Calls that no member completes before all have issued them, whatever their sizes.
_NEED_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})


@dataclass(frozen=True, slots=True)
class Track:
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


@dataclass(frozen=True, slots=True)
class Tracks:
    """The rows of all dumps. Collectives on groups without a key are left out: their positions
    cannot be used."""

    #: By group and rank, for the ranks whose dump has collectives of the group.
    of_group: dict[Key, dict[int, Track]] = field(default_factory=lambda: defaultdict(dict))
    #: By rank, the rows of sends and receives.
    apart: dict[int, Sequence[int]] = field(default_factory=dict)


def tracks(dumps: Mapping[int, Dump], keys: Keys) -> Tracks:
    """The rows of ``dumps`` by group."""
    found = Tracks()
    signs: dict[tuple[str, int, int, str], int] = {}
    known: dict[object, tuple[list[int], list[tuple[int, array[int], array[int]]]]] = {}
    for rank, dump in dumps.items():
        places: dict[str, int] = {}  # group -> its place among those of this dump
        of_kind, sign = [], []
        for kind in dump.kinds:
            sizes = (0, 0) if kind.op in _UNEVEN else (kind.numel_in, kind.numel_out)
            apart = kind.op in P2P
            of_kind.append(-1 if apart else places.setdefault(kind.group, len(places)))
            sign.append(signs.setdefault((kind.op, *sizes, kind.dtype), len(signs)))
        shape = dump.kind.tobytes(), *of_kind, *sign
        if shape not in known:
            known[shape] = _split(dump.kind, of_kind, sign)
        found.apart[rank], parts = known[shape]
        names = [*places]
        for place, rows, calls in parts:
            if (key := keys[rank].get(names[place])) is not None:
                first, last = dump.position[rows[0]], dump.position[rows[-1]]
                steady = last - first == len(rows) - 1
                found.of_group[key][rank] = Track(rows, calls, first, last + 1, steady)
    return found


def _split(
    kinds: array[int], of_kind: Sequence[int], sign: Sequence[int]
) -> tuple[list[int], list[tuple[int, array[int], array[int]]]]:
    """The rows of sends and receives, and by place of a group its rows and their signs."""
    by_place: dict[int, list[int]] = {-1: []}
    for row, number in enumerate(kinds):
        place = of_kind[number]
        if place in by_place:
            by_place[place].append(row)
        else:
            by_place[place] = [row]
    apart = by_place.pop(-1)
    return apart, [
        (place, array("l", rows), array("l", [sign[kinds[row]] for row in rows]))
        for place, rows in by_place.items()
    ]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far one rank got on one group: counts of calls."""

    issued: int
    completed: int
    #: ``completed``, if the newest of them needs all members; else 0.
    proven: int


def reached(dumps: Mapping[int, Dump], split: Tracks) -> dict[Key, dict[int, Reach]]:
    """By group and rank, for the ranks whose dump has collectives of the group."""
    found: dict[Key, dict[int, Reach]] = {}
    for key, of_rank in split.of_group.items():
        found[key] = {rank: _reach(dumps[rank], track) for rank, track in of_rank.items()}
    return found


def _reach(dump: Dump, track: Track) -> Reach:
    rows, state = track.rows, dump.state
    last = next((at for at in range(len(rows) - 1, -1, -1) if state[rows[at]] == COMPLETED), -1)
    completed = dump.position[rows[last + 1]] if last + 1 < len(rows) else track.end
    needs_all = last >= 0 and dump.kinds[dump.kind[rows[last]]].op in _NEED_ALL
    return Reach(track.end, completed, completed if needs_all else 0)


def settled(
    dumps: Mapping[int, Dump], keys: Keys, progress: Mapping[Key, Mapping[int, Reach]]
) -> dict[int, dict[str, int]]:
    """By rank and shared name, the calls of groups that have none in the rank's dump.

    ``pg_status`` tells them, if all completed. It may count sends and receives; then it does not
    fit between the other members' calls, and nothing is known but that no call is open.
    """
    found: dict[int, dict[str, int]] = {}
    for rank, dump in dumps.items():
        found[rank] = {}
        for name, key in keys[rank].items():
            others = progress.get(key, {})
            issued, completed = dump.status.get(name, (-1, -1))
            if rank in others or issued != completed:
                continue
            low = min((one.completed for one in others.values()), default=0)
            high = min((one.issued for one in others.values()), default=issued)
            if max(0, low - 1) <= issued <= high:
                found[rank][key[0]] = issued
            elif dump.open_only:
                found[rank][key[0]] = 0
    return found


def older(
    dumps: Mapping[int, Dump],
    groups: Mapping[tuple[int, str], Group],
    progress: Mapping[Key, Mapping[int, Reach]],
) -> dict[int, str]:
    """Ranks whose dump was written before another member's, with the proof. gloo runs the calls of
    a group side by side, so there it cannot be told."""
    labels = {(group.name, group.ranks): group.label for group in groups.values()}
    found: dict[int, str] = {}
    for key, of_rank in progress.items():
        ahead = max(of_rank, key=lambda rank: of_rank[rank].proven)
        most = of_rank[ahead].proven
        if dumps[ahead].backend == "gloo":
            continue
        for rank, own in of_rank.items():
            if most > own.issued or most > own.completed + 1:
                found.setdefault(
                    rank,
                    f"rank {rank}: its calls after its dump was written (rank {ahead}'s dump is "
                    f"younger: it completed call {most - 1} of {labels[key]}, which rank {rank} "
                    f"had not {'issued' if most > own.issued else 'begun'})",
                )
    return found
