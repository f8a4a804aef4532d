"""Chooses the cells to make next, as a pure function of those that exist.

So an interrupted matrix is resumed by asking again, and nothing is done twice. Three modes:

- real: a run at every place;
- fast: the prediction at every place;
- confirm: the prediction at every place; between two different neighbours, halving among the
  releases between them until the change is exact; then a run on both sides of every change and on
  the next release, at both ends, and wherever the prediction failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from packaging.version import Version

from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN, Cell, Key, Mode, ordered
from moediag.records import dataclass
from moediag.result import Verdict
from moediag.result.verdicts import StrEnum


class Way(StrEnum):
    REAL = "real"
    FAST = "fast"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of the table and the work left. ``rows``: requested versions and those between,
    oldest first; ``work``: cells that can be made now, release by release; their results can add
    more."""

    rows: tuple[str, ...]
    work: tuple[Key, ...]


def plan(
    way: Way,
    subjects: Sequence[str],
    asked: Sequence[str],
    listed: Sequence[str],
    cells: Mapping[Key, Cell],
) -> Plan:
    """Returns the next cells. ``asked``: versions for the table; ``listed``: all that may be tried
    between them."""
    rows = ordered(asked)
    if way == Way.REAL:
        return Plan(rows, _open(rows, subjects, Mode.REAL, cells))
    while True:
        fast = _open(rows, subjects, Mode.FAST, cells)
        if fast or way == Way.FAST:
            return Plan(rows, fast)
        between = {m for s in subjects for m in _between(_column(s, rows, cells), rows, listed)}
        if not between:
            break
        rows = ordered([*rows, *between])
    wanted = {(s, v, Mode.REAL) for s in subjects for v in _confirmed(s, rows, cells)}
    return Plan(rows, tuple(k for k in _open(rows, subjects, Mode.REAL, cells) if k in wanted))


def _open(
    rows: Sequence[str], subjects: Sequence[str], mode: Mode, cells: Mapping[Key, Cell]
) -> tuple[Key, ...]:
    keys = ((subject, version, mode) for version in rows for subject in subjects)
    return tuple(key for key in keys if key not in cells)


def _column(subject: str, rows: Sequence[str], cells: Mapping[Key, Cell]) -> list[tuple[str, Cell]]:
    """Returns the fast cells with a result, oldest first."""
    found = ((version, cells[subject, version, Mode.FAST]) for version in rows)
    return [(version, cell) for version, cell in found if cell.status is not None]


def _between(
    column: Sequence[tuple[str, Cell]], rows: Sequence[str], listed: Sequence[str]
) -> list[str]:
    """Yields the middle release of each stretch in which the failure appears or disappears."""
    found = []
    for (old, before), (new, after) in itertools.pairwise(column):
        if before.shows is None or after.shows is None or before.shows == after.shows:
            continue
        low, high = Version(old), Version(new)
        left = [v for v in listed if low < Version(v) < high and v not in rows]
        if left:
            found.append(left[len(left) // 2])
    return found


def _confirmed(subject: str, rows: Sequence[str], cells: Mapping[Key, Cell]) -> set[str]:
    """Returns versions that need a run."""
    column = _column(subject, rows, cells)
    wanted = {v for v in rows if cells[subject, v, Mode.FAST].verdict == COULD_NOT_RUN}
    there = [place for place, (_, cell) in enumerate(column) if _has(cell)]
    if there:
        wanted |= {column[there[0]][0], column[there[-1]][0]}
    for place in range(1, len(column)):
        if column[place][1].status != column[place - 1][1].status:
            near = column[place - 1 : place + 2]
            wanted |= {version for version, cell in near if _has(cell)}
    return wanted


def _has(cell: Cell) -> bool:
    """Whether the release has what the subject tests."""
    return cell.verdict != Verdict.NOT_APPLICABLE
