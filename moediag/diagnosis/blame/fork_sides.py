"""Groups of ranks that made different calls in the user's code, and the lines that led there."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from moediag.diagnosis.schedules.align import Aligned, Schedule
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Collective, Evidence
from moediag.records import dataclass

_LINE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+) (?P<function>.+)")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code in a chain of calls."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that took one path."""

    ranks: tuple[int, ...]
    #: Outermost first; empty if they ended, and it is not known where.
    chain: tuple[Line, ...]
    #: The call that they made there; None if they ended.
    call: Collective | None
    #: The last call that both sides made, and its lines.
    common: Collective | None
    before: tuple[Line, ...]


def sides_of(found: Divergence, aligned: Aligned, evidence: Evidence) -> list[Side]:
    schedule = next((s for s in aligned.schedules.values() if s.group == found.group), None)
    if schedule is None or found.surplus or found.kind in ("order", "splits", "parameters"):
        return []
    own = frozenset(path.rpartition("/")[2] for path in evidence.sources)
    together: dict[tuple[Line, ...], list[int]] = {}
    for rank in (*found.calls, *found.absent):
        if rank not in evidence.ranks or rank not in schedule.starts:
            return []
        call = found.calls.get(rank)
        left = found.left.get(rank)
        lines = made_at(call, own) if call is not None else _own(left.lines if left else (), own)
        if not lines and (call is not None or rank not in found.ended):
            return []
        ranks = together.setdefault(lines, [])
        ranks += [rank] * (rank not in ranks)
    return [_side(lines, ranks, found, schedule, own) for lines, ranks in together.items()]


def _side(
    lines: tuple[Line, ...],
    ranks: Sequence[int],
    found: Divergence,
    schedule: Schedule,
    own: Collection[str],
) -> Side:
    common = schedule.at(ranks[0], found.position - 1) if found.position else None
    before = made_at(common, own) if common is not None else ()
    return Side(tuple(ranks), lines, found.calls.get(ranks[0]), common, before)


def made_at(call: Collective, own: Collection[str]) -> tuple[Line, ...]:
    """The lines of the program's ``own`` files that led to a call, outermost first."""
    return _own((call.site, *call.callers), own)


def _own(lines: Sequence[str], own: Collection[str]) -> tuple[Line, ...]:
    found = [_line(text) for text in reversed(lines)]
    return tuple(one for one in found if one is not None and one.file in own)


def _line(text: str) -> Line | None:
    found = _LINE.fullmatch(text)
    return found and Line(found["file"], int(found["line"]), found["function"].rpartition(".")[2])


def part_from(chain: tuple[Line, ...], level: Line) -> tuple[Line, ...]:
    """The part of a chain from its innermost line in the function of ``level`` on."""
    for place in reversed(range(len(chain))):
        if (chain[place].file, chain[place].function) == (level.file, level.function):
            return chain[place:]
    return ()
