"""Groups ranks by similar stacks: common frames once, and the frames in which others differ.

Pure. Ranks that wait in the same place by another path (another line of the same function, one more
frame) are grouped, which leaves the few stacks that really differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from moediag.records import dataclass

ALIKE = 0.7  # minimum share of equal frames, by function and file, to group stacks
_MOST_COMPARED = 64  # different stacks that are compared; beyond that they are not grouped

Frames = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """Ranks with exactly these frames. ``own``: frames that the family's first does not have."""

    ranks: tuple[int, ...]
    frames: Frames
    own: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Similar stacks, the most frequent first."""

    variants: tuple[Variant, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for variant in self.variants for rank in variant.ranks))


def families(stacks: Mapping[int, Sequence[str]]) -> tuple[Family, ...]:
    """Returns the families, the smallest first, because the rank that differs matters most.
    ``stacks``: rank -> frames, innermost first."""
    exact: dict[Frames, list[int]] = {}
    for rank, frames in stacks.items():
        exact.setdefault(tuple(frames), []).append(rank)
    groups = sorted(exact.items(), key=lambda item: (-len(item[1]), min(item[1])))
    found: list[list[tuple[Frames, list[int]]]] = []
    for number, (frames, ranks) in enumerate(groups):
        near = found if number < _MOST_COMPARED else []
        family = next((f for f in near if alike(frames, f[0][0])), None)
        if family is None:
            found.append([(frames, ranks)])
        else:
            family.append((frames, ranks))
    made = [Family(tuple(_variant(f, r, family[0][0]) for f, r in family)) for family in found]
    return tuple(sorted(made, key=lambda family: (len(family.ranks), family.ranks)))


def alike(one: Frames, other: Frames) -> bool:
    """Whether most frames have the same function and file in the same order. The innermost frames
    must match, because they show what a rank waits for."""
    if not one or not other or _place(one[0]) != _place(other[0]):
        return False
    matcher = SequenceMatcher(None, [*map(_place, one)], [*map(_place, other)], autojunk=False)
    return matcher.ratio() >= ALIKE


def _variant(frames: Frames, ranks: Sequence[int], first: Frames) -> Variant:
    common = set(first)
    return Variant(tuple(sorted(ranks)), frames, tuple(frame not in common for frame in frames))


def _place(frame: str) -> str:
    """Returns ``forward (model.py:12)`` without its line."""
    return re.sub(r":\d+\)$", ")", frame)
