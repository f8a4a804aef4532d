"""The class of all mesh axes: an axis is its own name, and answers what depends on it.

Code that wraps, loads, compares or explains asks these questions and compares no names. The axes
that exist are in :mod:`moediag.axes.mesh_axes`; ``docs/extending/add-an-axis.md`` shows how to add
one.
"""

from __future__ import annotations

from typing import ClassVar, List, Optional, Tuple

from moediag.errors import LayoutError

# What ``skew.batches`` of a scenario may ask for that an axis must know.
PER_REPLICA = "per-replica"


class Axis(str):
    """A mesh axis. It is a ``str`` equal to its name, so that it is a key of any layout and is
    written to JSON as it is.

    A subclass sets the class attributes and overrides the questions whose usual answer is wrong
    for it. There is one instance of each, see :func:`register`.
    """

    # As scenarios, meshes and pages spell it.
    name: ClassVar[str]
    # What it does, as a noun phrase for pages.
    about: ClassVar[str]
    # What a size of 1 means.
    alone: ClassVar[str]
    # Ranks along it are data-parallel workers: wrappers such as FSDP and DDP lay their mesh on it.
    data_parallel: ClassVar[bool] = False
    # It divides the routed experts and no other parameter.
    experts_only: ClassVar[bool] = False
    # ``from_pretrained`` divides the model along it while it loads a checkpoint.
    by_loading: ClassVar[bool] = False
    # The step under test can run with more than one rank along it.
    supported: ClassVar[bool] = True

    __slots__ = ()

    def __new__(cls) -> Axis:
        return super().__new__(cls, cls.name)

    def __reduce__(self) -> Tuple[object, Tuple[str]]:
        return find, (str(self),)  # a copy is the same object

    def shares_batch(self, batches: str) -> bool:
        """Whether ranks that differ only along this axis work on the same batch. ``batches``: what
        the trial asks for, ``skew.batches``."""
        raise NotImplementedError

    def divides(self, experts: bool) -> bool:
        """Whether parameters may be divided along this axis. ``experts``: of the routed experts'
        parameters, else of all others."""
        raise NotImplementedError

    def equal(self, experts: bool) -> bool:
        """Whether ranks that differ only along this axis hold equal copies of every parameter of
        that kind, so that a difference between them is an error."""
        return not self.divides(experts)

    def mine(self, rows: int, index: int, size: int, experts: bool) -> range:
        """The rows (indices along the divided dim, ``rows`` in all) that the rank at ``index`` of
        ``size`` holds: equal pieces in rank order, the first ones larger by what is left over as
        ``torch.chunk`` makes them; all rows of a parameter that is not divided."""
        if not self.divides(experts):
            return range(rows)
        each = -(-rows // size)
        return range(min(index * each, rows), min((index + 1) * each, rows))

    def divisor(self, size: int, batches: str) -> int:
        """What a sum of gradients over the ranks of this axis is divided by, so that it is the
        gradient of the mean loss: their number where each has a loss of its own tokens, 1 where
        all compute the same loss."""
        return 1 if self.shares_batch(batches) else size


# All axes, outermost (slowest varying in the grid of ranks) first.
AXES: List[Axis] = []


def register(axis: Axis, inside: Optional[Axis] = None) -> Axis:
    """Adds ``axis`` to AXES and returns it. ``inside``: the axis next to it on the outer side;
    None puts it innermost."""
    if axis in AXES:
        raise LayoutError(f"there is a mesh axis {axis} already")
    AXES.insert(len(AXES) if inside is None else AXES.index(inside) + 1, axis)
    return axis


def find(name: str) -> Axis:
    """The axis of that name. Raises LayoutError."""
    for axis in AXES:
        if axis == name:
            return axis
    raise LayoutError(f"unknown mesh axis {name!r}; the axes are {', '.join(AXES)}")


def supported() -> str:
    """The axes that the step under test can run, for messages: ``dp_replicate, ep and tp``."""
    *most, last = [str(axis) for axis in AXES if axis.supported]
    return f"{', '.join(most)} and {last}" if most else last
