"""Which ranks agree on a value, and how far apart values are that each rank computes itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import isfinite

# A difference of tensors, as a part of their norm, that no rounding makes (bfloat16: 0.004).
LARGE = 0.2


def sides(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """Ranks by value, the largest side first."""
    found: dict[Hashable, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, found.values()), key=lambda side: (-len(side), side)))


def minority(sides: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """All ranks outside a strict majority; () without one."""
    most, *others = sorted(sides, key=len, reverse=True)
    outside = [rank for side in others for rank in side]
    return tuple(sorted(outside)) if len(most) > len(outside) else ()


def difference(sketches: Sequence[tuple[float, float]]) -> float:
    """About the norm of the largest difference between tensors, as a part of the largest norm, from
    each one's sketch: the sum with random signs, and the norm."""
    totals, norms = [total for total, _ in sketches], [norm for _, norm in sketches]
    most = max(norms)
    found = max(max(totals) - min(totals), most - min(norms)) / most if most else 0.0
    return found if isfinite(found) else 0.0
