"""Ranks changed functions by how probably they cause the failure. Pure.

A release changes hundreds of functions. What the failing trial never ran is no cause; of the rest
those come first that stand in the failure's own stacks, then those of the model's classes around
the parameters that the failure names, the innermost first: a change to the code of
``model.layers.1.mlp`` explains a gradient that never came for ``model.layers.1.mlp.experts.3…``
better than a change to that of ``model``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moediag.campaign.bisect.suspects.functions import TOP, ChangedFunction, Piece
from moediag.evidence.executed import Executed

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Clues:
    """What a failure names. ``parameters``: parameters or modules by FQN, numbered or ``*``;
    ``frames``: (file as imported, line) of its stacks; ``old`` and ``new``: what the trials on
    both sides ran."""

    parameters: tuple[str, ...] = ()
    frames: tuple[tuple[str, int], ...] = ()
    old: Executed = field(default_factory=Executed)
    new: Executed = field(default_factory=Executed)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A changed function with why it stands where it stands. ``ran``: in a trial of a side that
    has it; ``depth``: components of the innermost module around a named parameter whose class it
    belongs to, -1 for none; ``place``: that module."""

    change: ChangedFunction
    ran: bool
    in_stack: bool = False
    depth: int = -1
    place: str = ""

    @property
    def why(self) -> str:
        parts = []
        if self.in_stack:
            parts.append("in the failure's stack")
        if self.depth >= 0:
            parts.append(f"code of {self.place or 'the model'}, around what failed")
        parts.append("ran" if self.ran else "imported, did not run")
        return "; ".join(parts)


def ranked(changes: Iterable[ChangedFunction], clues: Clues) -> list[Suspect]:
    """The likeliest first; what is alike is ordered by how much of it changed."""
    wanted = {tuple(_NUMBER.sub("*", name).split(".")) for name in clues.parameters}
    found = [_suspect(change, clues, wanted) for change in changes]
    return sorted(
        found,
        key=lambda s: (
            not s.in_stack,
            not s.ran,
            -s.depth,
            -s.change.size,
            s.change.file,
            s.change.name,
        ),
    )


def _suspect(change: ChangedFunction, clues: Clues, wanted: set[tuple[str, ...]]) -> Suspect:
    sides = ((change.old, clues.old), (change.new, clues.new))
    ran = any(_ran(piece, executed.functions, change) for piece, executed in sides)
    in_stack = any(file == change.file and _is_own(change, line) for file, line in clues.frames)
    depth, place = max(
        (_depth(change, executed, wanted) for piece, executed in sides if piece),
        default=(-1, ""),
    )
    return Suspect(change, ran, in_stack, depth, place)


def _ran(piece: Piece | None, functions: Mapping[str, set[int]], change: ChangedFunction) -> bool:
    """The statements of a file or of a class that both sides have run when it is imported: no
    trial says more about them."""
    lines = functions.get(change.file, set())
    if piece is None or not _whole(change):
        return False
    return any(piece.first <= line <= piece.last for line in lines)


def _is_own(change: ChangedFunction, line: int) -> bool:
    # Frames are those of the failing side; the other side's lines lie near enough.
    sides = [piece for piece in (change.old, change.new) if piece]
    return _whole(change) and any(piece.first <= line <= piece.last for piece in sides)


def _whole(change: ChangedFunction) -> bool:
    """It is a function, or a class that one side has not."""
    sides = [piece for piece in (change.old, change.new) if piece]
    return change.name != TOP and not (len(sides) == 2 and sides[0].is_class)


def _depth(
    change: ChangedFunction, executed: Executed, wanted: set[tuple[str, ...]]
) -> tuple[int, str]:
    """Of the class that the change belongs to, or is."""
    parts = change.name.split(".")
    best = (-1, "")
    for number in range(1, len(parts) + 1):
        for place in executed.classes.get((change.file, ".".join(parts[:number])), ()):
            path = tuple(place.split(".")) if place else ()
            if any(name[: len(path)] == path for name in wanted):
                best = max(best, (len(path), place))
    return best


def named(
    worst: str | None, missing: Sequence[str], wrong: Sequence[str], module: str
) -> tuple[str, ...]:
    """What a trial's result names, the most exact: parameters that are missing in a collective,
    else those that are wrong, else the module of the divergence."""
    for names in (missing, [*wrong, *([worst] if worst else [])], [module] if module else []):
        if names:
            return tuple(dict.fromkeys(names))
    return ()
