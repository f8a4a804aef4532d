"""Which part of a tensor each rank of a mesh holds, from its placements. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Dict, Sequence, Tuple

Placed = Tuple[int, int, bool]  # mesh axis (its number), tensor dim, whether it is strided


def part(size: int, sizes: Sequence[int], placed: Sequence[Placed], at: Sequence[int]) -> range:
    """Returns the indices along one dim of ``size`` that the rank at mesh coordinate ``at`` holds.
    ``placed``: the placements that divide this dim. Pieces are those of ``torch.chunk``. A strided
    placement divides what the others have left, although its axis is an outer one."""
    found = range(size)
    for axis, _, _ in sorted(placed, key=lambda one: (one[2], one[0])):
        each = -(-len(found) // sizes[axis])
        found = found[at[axis] * each : (at[axis] + 1) * each]
    return found


def held(
    shape: Sequence[int], sizes: Sequence[int], placed: Sequence[Placed], at: Sequence[int]
) -> int:
    """Returns the number of elements that the rank at ``at`` holds."""
    return math.prod(
        len(part(size, sizes, [p for p in placed if p[1] == dim], at))
        for dim, size in enumerate(shape)
    )


def most_and_least(
    shape: Sequence[int], sizes: Sequence[int], placed: Sequence[Placed]
) -> Tuple[int, int]:
    """Returns the elements of the rank that holds most and of the one that holds least: pieces are
    never larger than the first one, nor smaller than the last one."""
    first, last = [0] * len(sizes), [size - 1 for size in sizes]
    return held(shape, sizes, placed, first), held(shape, sizes, placed, last)


def by_coordinate(
    size: int, sizes: Sequence[int], placed: Sequence[Placed]
) -> Dict[Tuple[int, ...], range]:
    """Returns the indices along one dim by mesh coordinate."""
    return {
        at: part(size, sizes, placed, at)
        for at in itertools.product(*(range(count) for count in sizes))
    }
