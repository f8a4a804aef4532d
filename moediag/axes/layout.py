"""The device mesh as arithmetic: axes, sizes, and the grid of ranks.

Ranks 0..N-1 fill the mesh in row-major order, the first axis of AXES varying slowest. A group of
an axis is then a slice of that grid: every other coordinate held fixed. Pure; prints itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from moediag.errors import LayoutError

# Outermost (slowest varying) first. Pipeline stages talk least and may lie on different hosts;
# tensor parallelism talks most, so its ranks are neighbours. Expert axes lie inside data
# parallelism because expert parallelism is carved out of it.
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "etp", "tp")

# The size that a scenario gives to the one axis that takes the ranks the others leave.
WORLD = "world"


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh axis -> size, held outermost first; axes left out have size 1.

    Raises LayoutError for an unknown axis or a size below 1.
    """

    axes: dict[str, int]

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if axis not in AXES:
                raise LayoutError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(
                    f"mesh axis {axis} has size {size!r}; a size is a whole number from 1"
                )
        ordered = {axis: self.axes[axis] for axis in AXES if axis in self.axes}
        object.__setattr__(self, "axes", ordered)

    @classmethod
    def resolve(cls, request: Mapping[str, int | str], world_size: int) -> Layout:
        """The layout of ``world_size`` ranks. Each axis of ``request`` is a size or ``"world"``
        (at most one axis): what the others leave. An empty request is ``dp_shard: world``.

        Raises LayoutError, printing every factor, when the product cannot be ``world_size``.
        """
        request = request or {"dp_shard": WORLD}
        takers = [axis for axis, size in request.items() if size == WORLD]
        fixed = {axis: size for axis, size in request.items() if isinstance(size, int)}
        odd = [f"{a}={s!r}" for a, s in request.items() if a not in fixed and a not in takers]
        if odd:
            raise LayoutError(f'a mesh axis is a whole number or "{WORLD}", not {", ".join(odd)}')
        if len(takers) > 1:
            raise LayoutError(f'only one mesh axis can be "{WORLD}", not {" and ".join(takers)}')
        if world_size < 1:
            raise LayoutError(f"{world_size} ranks cannot hold a mesh")
        cls(fixed)  # names and sizes are checked before they are multiplied
        product = math.prod(fixed.values())
        if takers:
            cls({takers[0]: 1})
            if world_size % product:
                raise LayoutError(
                    f"{_factors(request)}: {world_size} ranks cannot be divided by {product}"
                )
            fixed[takers[0]] = world_size // product
        elif product != world_size:
            raise LayoutError(f"{_factors(request)} = {product}, but there are {world_size} ranks")
        return cls(fixed)

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    def size(self, axis: str) -> int:
        """The size of ``axis``, 1 when the layout does not name it."""
        if axis not in AXES:
            raise LayoutError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        return self.axes.get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` lies: axis -> index, for the axes of this layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside {self}")
        found: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, size)
        return dict(reversed(found.items()))

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of :meth:`coordinates`; an axis left out counts as index 0."""
        number = 0
        for axis, size in self.axes.items():
            number = number * size + coordinates.get(axis, 0)
        return number

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ``axis``, each in mesh order: every rank is in exactly one of them."""
        size = self.size(axis)
        others = [range(n) for a, n in self.axes.items() if a != axis]
        names = [a for a in self.axes if a != axis]
        return tuple(
            tuple(
                self.rank({**dict(zip(names, fixed, strict=True)), axis: index})
                for index in range(size)
            )
            for fixed in itertools.product(*others)
        )

    def grid(self) -> str:
        """The rank grid as text: the innermost axis runs along a line, the next one down."""
        shown = [(axis, size) for axis, size in self.axes.items() if size > 1]
        if not shown:
            return "0"
        (inner, columns), outer = shown[-1], shown[:-1]
        width = len(str(self.world_size - 1))
        labels = [
            " ".join(f"{axis}={i}" for (axis, _), i in zip(outer, index, strict=True))
            for index in itertools.product(*(range(size) for _, size in outer))
        ]
        margin = max(map(len, labels))
        head = f"{'':{margin}}  {inner} ->"
        lines = [head if margin else head.lstrip()]
        for row, label in enumerate(labels):
            ranks = range(row * columns, (row + 1) * columns)
            line = f"{label:{margin}}  " + " ".join(f"{r:>{width}}" for r in ranks)
            lines.append(line if margin else line.lstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{_factors(self.axes)} = {self.world_size} ranks"


def _factors(request: Mapping[str, int | str]) -> str:
    ordered = [a for a in AXES if a in request] + [a for a in request if a not in AXES]
    return " x ".join(f"{axis}={request[axis]}" for axis in ordered) or "no axes"
