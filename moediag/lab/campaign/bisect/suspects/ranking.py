"""Ranks changed functions by how probably they cause the failure. Pure.

A release changes hundreds of functions. A function that the failing trial never ran is not the
cause. Of the rest, functions in the failure's own stacks come first. Then come those of the model's
classes around the parameters that the failure names, the innermost first: a change to the code of
``model.layers.1.mlp`` explains a missing gradient of ``model.layers.1.mlp.experts.3…`` better than
a change to that of ``model``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from moediag.lab.campaign.bisect.executed import Executed
from moediag.lab.campaign.bisect.suspects.functions import TOP, ChangedFunction, Piece
from moediag.records import dataclass

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Clues:
    """What a failure names."""

    parameters: tuple[str, ...] = ()  # parameters or modules by FQN, numbered or ``*``
    frames: tuple[tuple[str, int], ...] = ()  # (file as imported, line) of its stacks
    old: Executed = field(default_factory=Executed)  # what the old side's trials ran
    new: Executed = field(default_factory=Executed)  # what the new side's trials ran


@dataclass(frozen=True, slots=True)
class Suspect:
    """A changed function and the reasons for its rank."""

    change: ChangedFunction
    ran: bool  # in a trial of a side that has it
    in_stack: bool = False
    # components of the innermost module around a named parameter whose class it belongs to, -1 for
    # none
    depth: int = -1
    place: str = ""  # that module

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
    """Returns the likeliest first; ties are ordered by the size of the change."""
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
    """Whether it ran. The statements of a file or class that both sides have run on import, so
    trials say nothing more about them."""
    lines = functions.get(change.file, set())
    if piece is None or not _whole(change):
        return False
    return any(piece.first <= line <= piece.last for line in lines)


def _is_own(change: ChangedFunction, line: int) -> bool:
    # Frames are the failing side's; the other side's lines are close enough.
    sides = [piece for piece in (change.old, change.new) if piece]
    return _whole(change) and any(piece.first <= line <= piece.last for piece in sides)


def _whole(change: ChangedFunction) -> bool:
    """Whether it is a function, or a class that one side lacks."""
    sides = [piece for piece in (change.old, change.new) if piece]
    return change.name != TOP and not (len(sides) == 2 and sides[0].is_class)


def _depth(
    change: ChangedFunction, executed: Executed, wanted: set[tuple[str, ...]]
) -> tuple[int, str]:
    """Returns the depth and place of the class that the change belongs to, or is."""
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
    """Returns what a trial's result names, the most exact: parameters missing in a collective, else
    wrong ones, else the module of the divergence."""
    for names in (missing, [*wrong, *([worst] if worst else [])], [module] if module else []):
        if names:
            return tuple(dict.fromkeys(names))
    return ()
