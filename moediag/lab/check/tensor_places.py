"""Where a parameter lies: mesh axes, sizes, and words about them."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from moediag.lab.check import placed
from moediag.protocol import MeshSlice
from moediag.recorder.step import pieces

_NAMED = 6  # names in a sentence


def axes(parameter: Any) -> str:
    """Returns the axes of a parameter's mesh, "" for a plain tensor."""
    return " x ".join(axis.name or "a mesh" for axis in pieces.axes_of(parameter))


def divided(parameter: Any) -> List[placed.Placed]:
    """Returns the placements of a DTensor that divide it."""
    return [
        (number, axis.dim, axis.strided)
        for number, axis in enumerate(pieces.axes_of(parameter)) if axis.dim is not None
    ]  # fmt: skip


def slices(parameter: Any) -> List[MeshSlice]:
    """Returns what each axis of its mesh does; empty for a plain tensor."""
    return [MeshSlice(a.name or "mesh", a.size, a.dim) for a in pieces.axes_of(parameter)]


def sizes(parameter: Any) -> Tuple[int, int]:
    """Returns the elements of the rank that holds most, and of the one that holds least."""
    counts = [axis.size for axis in pieces.axes_of(parameter)]
    return placed.most_and_least(tuple(parameter.shape), counts, divided(parameter))


def listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
