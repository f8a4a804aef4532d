"""The rows of many dumps by group: the collectives of each rank on each group, in order.

Ranks in the same place of a job issue the same calls, so their dumps often have equal columns.
These are sorted once, and share their result.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field

from moediag.evidence.flight_calls import Dump
from moediag.records import dataclass

Key = tuple[str, tuple[int, ...]]  # a group: its shared name and its members
Keys = Mapping[int, Mapping[str, Key]]  # rank -> its own name of a group -> the group
P2P = ("send", "recv")
_UNEVEN = ("all_to_all", "gather", "scatter")  # sizes may differ between ranks


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
