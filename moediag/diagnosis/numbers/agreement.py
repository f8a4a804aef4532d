"""Whether values of several ranks agree: the sides, the minority, and how far they lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TypeVar

from moediag.result.wording import by_value as sides

__all__ = ["apart", "far", "minority", "sides", "together"]

T = TypeVar("T")
Place = TypeVar("Place", int, tuple[str, int])


def minority(sides: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """All ranks outside a strict majority; () without one."""
    largest_first = sorted(sides, key=len, reverse=True)
    others = [rank for side in largest_first[1:] for rank in side]
    return tuple(sorted(others)) if len(largest_first[0]) > len(others) else ()


def apart(values: Iterable[float], tolerance: float) -> bool:
    """Whether values, of ranks or of a rank and a reference, differ by more than ``tolerance``,
    relative to the largest. nan differs from nothing."""
    known = [value for value in values if value == value]
    low, high = min(known, default=0.0), max(known, default=0.0)
    within = isfinite(high - low) and high - low <= tolerance * max(abs(low), abs(high))
    return high != low and not within


def together(rows: Mapping[int, Iterable[tuple[Place, T]]]) -> dict[Place, dict[int, T]]:
    """By step (or line and step) and rank, the last that each rank recorded of it: only of those
    that all of them have."""
    found: dict[Place, dict[int, T]] = defaultdict(dict)
    for rank, of in rows.items():
        for step, one in of:
            found[step][rank] = one
    return {step: of for step, of in sorted(found.items()) if len(of) == len(rows)}


def far(sketches: Sequence[tuple[float, float]]) -> float:
    """About the norm of the largest difference of tensors, as a part of their norm; 0 where it is
    not known. A sketch is a random sum of the elements, and the norm."""
    totals, norms = [total for total, _ in sketches], [norm for _, norm in sketches]
    most = max(norms)
    found = max(max(totals) - min(totals), most - min(norms)) / most if most else 0.0
    return found if isfinite(found) else 0.0
