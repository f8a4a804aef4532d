"""The device mesh as arithmetic: axes, sizes, and the grid of ranks.

Ranks 0..N-1 fill the mesh in row-major order, the first axis of AXES varying slowest. A group of
an axis is then a slice of that grid: every other coordinate held fixed. Pure; prints itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple, Union

from moediag.axes.axis import AXES, Axis, find
from moediag.axes.mesh_axes import DP_SHARD
from moediag.errors import LayoutError

# The size that a scenario gives to the one axis that takes the ranks the others leave.
WORLD = "world"


@dataclass(frozen=True, init=False)
class Layout:
    """Mesh axis -> size, held outermost first; axes left out have size 1.

    Raises LayoutError for an unknown axis or a size below 1.
    """

    axes: Dict[Axis, int]

    def __init__(self, axes: Mapping[str, int]) -> None:
        for axis, size in axes.items():
            find(axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(
                    f"mesh axis {axis} has size {size!r}; a size is a whole number from 1"
                )
        # Keys become the axes themselves, whatever text named them.
        object.__setattr__(self, "axes", {a: axes[a] for a in AXES if a in axes})

    @classmethod
    def resolve(cls, request: Mapping[str, Union[int, str]], world_size: int) -> Layout:
        """The layout of ``world_size`` ranks. Each axis of ``request`` is a size or ``"world"``
        (at most one axis): what the others leave. An empty request is ``dp_shard: world``.

        Raises LayoutError, printing every factor, when the product cannot be ``world_size``.
        """
        request = request or {DP_SHARD: WORLD}
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
        return self.axes.get(find(axis), 1)

    @property
    def active(self) -> Tuple[Axis, ...]:
        """The axes with more than one rank, outermost first: an axis of size 1 divides nothing."""
        return tuple(axis for axis, size in self.axes.items() if size > 1)

    def coordinates(self, rank: int) -> Dict[Axis, int]:
        """Where ``rank`` lies: axis -> index, for the axes of this layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside {self}")
        found: Dict[Axis, int] = {}
        for axis, size in reversed(list(self.axes.items())):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of :meth:`coordinates`; an axis left out counts as index 0."""
        number = 0
        for axis, size in self.axes.items():
            number = number * size + coordinates.get(axis, 0)
        return number

    def groups(self, axis: str) -> Tuple[Tuple[int, ...], ...]:
        """The groups of ``axis``, each in mesh order: every rank is in exactly one of them."""
        find(axis)
        found: Dict[Tuple[int, ...], List[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(tuple(i for a, i in at.items() if a != axis), []).append(rank)
        return tuple(map(tuple, found.values()))

    def index(self, axis: str, rank: int) -> int:
        """The place of ``rank`` on ``axis``, 0 when the layout does not name it."""
        return self.coordinates(rank).get(find(axis), 0)

    def batch_source(self, rank: int, batches: str) -> int:
        """The rank whose batch ``rank`` works on: the lowest of those that share one. ``batches``:
        what the trial asks for, ``skew.batches``; ``identical`` and ``repeated`` are rank 0's on
        all ranks."""
        if batches in ("identical", "repeated"):
            return 0
        at = self.coordinates(rank)
        return self.rank({a: 0 if a.shares_batch(batches) else i for a, i in at.items()})

    def shares_batches(self, batches: str) -> bool:
        """Whether some ranks work on the same batch because of where they lie on the mesh."""
        return any(axis.shares_batch(batches) for axis in self.active)

    def sums(self, experts: bool, batches: str) -> Tuple[Axis, ...]:
        """The axes over whose ranks a gradient must be summed, outermost first: those whose ranks
        have tokens of their own. ``experts``: of the routed experts, which get the tokens of the
        axes that divide nothing else."""
        return tuple(
            axis for axis in self.active
            if axis.divisor(2, batches) > 1 and not (experts and axis.experts_only)
        )  # fmt: skip

    def divisor(self, batches: str) -> int:
        """What a sum of gradients over all ranks is divided by to be that of the mean loss."""
        return math.prod(axis.divisor(size, batches) for axis, size in self.axes.items())

    def grid(self) -> str:
        """The rank grid as text: the innermost axis runs along a line, the next one down."""
        shown = [(axis, size) for axis, size in self.axes.items() if size > 1]
        if not shown:
            return "0"
        (inner, columns), outer = shown[-1], shown[:-1]
        width = len(str(self.world_size - 1))
        labels = [
            " ".join(f"{axis}={i}" for (axis, _), i in zip(outer, index))  # noqa: B905 - Python 3.9
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


def _factors(request: Mapping[Any, Union[int, str]]) -> str:
    ordered = [a for a in AXES if a in request] + [a for a in request if a not in AXES]
    return " x ".join(f"{axis}={request[axis]}" for axis in ordered) or "no axes"
