"""Finds calls that all recorded ranks issued and that do not complete, although schedules agree.

Then no code is known to be wrong. The evidence may still show members that left no evidence, or a
call that completed (or began) on most members' devices but not on a few.
"""

from __future__ import annotations

from collections.abc import Mapping

from moediag.diagnosis.schedules.align import Aligned
from moediag.diagnosis.schedules.device_frontier import Standing, is_known, standing
from moediag.diagnosis.schedules.matching import ROOTED
from moediag.diagnosis.schedules.replay import Event
from moediag.diagnosis.schedules.usual_order import departed
from moediag.evidence.model import Collective, Evidence, Group
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Frontier:
    """The call that does not complete, and the suspect ranks."""

    basis: str = "none"
    """device (suspects are behind in a call that all made), habit (they reached a call in an
    unusual way, and other members were not seen), unseen (they left no evidence) or none."""
    suspects: tuple[int, ...] = ()
    call: Collective | None = None
    """The call that does not complete."""
    group: Group | None = None
    ahead: tuple[int, ...] = ()
    """The other members of its group."""
    unseen: tuple[int, ...] = ()
    """All members of such calls that left no evidence."""
    others: int = 0
    """How many more calls do not complete, independently of this one."""


def frontier(aligned: Aligned, evidence: Evidence) -> Frontier | None:
    """The frontier; None if no call is stuck, or no call was recorded."""
    if not any(seen.collectives for seen in evidence.ranks.values()):
        return None
    stands = standing(aligned, evidence)
    roots = stands.roots()
    if not roots:
        return None
    behind = {event: ranks for event in roots if (ranks := _lagging(aligned, event))}
    if behind:
        return _of("device", behind, stands)
    gone = {event: stands.unseen[event] for event in roots if stands.unseen[event]}
    odd = departed(
        {r: call for r, at in stands.at.items() for event, call in at.items() if event in gone},
        evidence,
        alone=True,
    )
    if odd:
        return _of("habit", {e: odd for e in gone if any(e in stands.at[r] for r in odd)}, stands)
    if gone:
        lost = [rank for rank in range(evidence.world_size) if not is_known(evidence, rank)]
        return _of("unseen", gone, stands, named=len(lost) == 1 and not stands.unplaced)
    return _of("none", dict.fromkeys(roots, ()), stands)


def _of(
    basis: str, found: Mapping[Event, tuple[int, ...]], stands: Standing, named: bool = True
) -> Frontier:
    """The frontier with the ranks that are suspect at any place. A rank that left no evidence is
    suspect only if no other did, and if it explains every waiting rank."""
    roots = stands.roots()
    event = min(found, key=lambda e: (roots[e].time, e[1]))
    group = stands.groups[event]
    every = tuple(sorted(set().union(*found.values())))
    unseen: tuple[int, ...] = ()
    if basis == "unseen":
        unseen, everywhere = every, len(found) == len(roots)
        every = every if named and everywhere else ()
    ahead = tuple(sorted(set(group.ranks) - set(found[event])))
    others = len(roots) - 1
    return Frontier(basis, every, roots[event], group, ahead, unseen=unseen, others=others)


def _lagging(aligned: Aligned, event: Event) -> tuple[int, ...]:
    """Ranks whose device is behind the others' in the call."""
    schedule, position = aligned.schedules.get(event[0]), event[1]
    if schedule is None:
        return ()
    levels: dict[int, int] = {}
    op = ""
    for rank in schedule.starts:
        call = schedule.at(rank, position)
        if schedule.completed(rank, position):
            levels[rank] = 2
        elif call is not None:
            levels[rank], op = int(call.started), call.op
    low, high = min(levels.values(), default=2), max(levels.values(), default=2)
    behind = tuple(sorted(rank for rank, level in levels.items() if level == low))
    # "Not begun" after all before it completed is clear. "Not completed" is so for few ranks only,
    # and a root may complete alone.
    few = 2 * len(behind) < len(levels) or len(levels) == 2
    clear = (few and op not in ROOTED) if high == 2 else True
    return behind if low < high and clear else ()
