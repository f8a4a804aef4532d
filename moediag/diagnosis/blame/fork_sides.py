"""Groups of ranks that made different calls in the user's code, and the lines that led there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moediag.diagnosis.end_states.whereabouts import program_lines
from moediag.diagnosis.schedules.align import Aligned, Schedule
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Collective, Evidence, Frame
from moediag.evidence.rank_stacks import in_last_call
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that took one path."""

    ranks: tuple[int, ...]
    #: Outermost first; empty if they ended, and it is not known where.
    chain: tuple[Frame, ...]
    #: The call that they made there; None if they ended.
    call: Collective | None
    #: The last call that both sides made, and its lines.
    common: Collective | None
    before: tuple[Frame, ...]


def sides_of(found: Divergence, aligned: Aligned, evidence: Evidence) -> list[Side]:
    schedule = next((s for s in aligned.schedules.values() if s.group == found.group), None)
    without = ("order", "splits", "parameters", "peer", "transfer")
    if schedule is None or found.surplus or found.kind in without:
        return []
    own = evidence.source_names
    together: dict[tuple[Frame, ...], list[int]] = {}
    for rank in (*found.calls, *found.absent):
        if rank not in evidence.ranks or rank not in schedule.starts:
            return []
        call = found.calls.get(rank)
        left, seen = found.left.get(rank), evidence.ranks[rank]
        ended = rank in found.ended
        if call is None and not ended and in_last_call(seen.stacks):
            lines, ended = _own(program_lines(seen), own), True  # its training is over
        else:
            lines = made_at(call, own) if call else _own(left.lines if left else (), own)
        if not lines and (call is not None or not ended):
            return []
        ranks = together.setdefault(lines, [])
        ranks += [rank] * (rank not in ranks)
    groups = [tuple(ranks) for ranks in together.values()]
    at = _parted_at(groups, found.position, schedule, evidence, own)
    sides = []
    for lines, ranks in together.items():
        call = schedule.at(ranks[0], at)
        common = schedule.at(ranks[0], at - 1) if at else None
        before = made_at(common, own) if common is not None else ()
        if at == found.position:
            sides.append(Side(tuple(ranks), lines, found.calls.get(ranks[0]), common, before))
        elif call is not None:
            sides.append(Side(tuple(ranks), made_at(call, own), call, common, before))
    return sides


def _parted_at(
    groups: Sequence[tuple[int, ...]],
    position: int,
    schedule: Schedule,
    evidence: Evidence,
    own: Collection[str],
) -> int:
    """The position from which on two groups made their calls in different lines, each of which the
    other group also runs: equal calls matched there by chance. Else ``position``."""
    if len(groups) != 2:
        return position
    known: list[set[tuple[Frame, ...]]] = [
        {made_at(call, own) for call in evidence.ranks[ranks[0]].collectives} for ranks in groups
    ]
    at = position
    while at > 0:
        lines = [
            {made_at(call, own) if call is not None else () for call in calls}
            for calls in ([schedule.at(rank, at - 1) for rank in ranks] for ranks in groups)
        ]
        if any(len(made) != 1 or () in made for made in lines):
            break
        (one,), (two,) = lines
        if one == two or one not in known[1] or two not in known[0]:
            break
        at -= 1
    return at


def made_at(call: Collective, own: Collection[str]) -> tuple[Frame, ...]:
    """The lines of the program's ``own`` files that led to a call, outermost first."""
    return _own((call.site, *call.callers), own)


def _own(lines: Sequence[str], own: Collection[str]) -> tuple[Frame, ...]:
    found = [Frame.at(text) for text in reversed(lines)]
    return tuple(one for one in found if one is not None and one.file in own)


def part_from(chain: tuple[Frame, ...], level: Frame) -> tuple[Frame, ...]:
    """The part of a chain from its innermost line in the function of ``level`` on."""
    for place in reversed(range(len(chain))):
        if (chain[place].file, chain[place].function) == (level.file, level.function):
            return chain[place:]
    return ()
