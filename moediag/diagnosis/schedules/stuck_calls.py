"""Finds calls that all recorded ranks issued and that do not complete, although schedules agree.

Then no code is known to be wrong. The evidence may still show members that left no evidence, or a
call that completed (or began) on most members' devices but not on a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moediag.diagnosis.schedules.align import Aligned, was_recorded
from moediag.diagnosis.schedules.device_frontier import standing
from moediag.diagnosis.schedules.replay import Event
from moediag.diagnosis.schedules.usual_order import departed
from moediag.evidence.model import Collective, Evidence, Group


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
        return _of("device", behind, roots, aligned)
    gone = {event: ranks for event in roots if (ranks := _unseen(aligned, evidence, event))}
    odd = departed(
        {r: call for r, at in stands.at.items() for event, call in at.items() if event in gone},
        evidence,
        alone=True,
    )
    if odd:
        return _of("habit", {e: odd for e in gone if any(e in stands.at[r] for r in odd)}, roots,
                   aligned)  # fmt: skip
    if gone:
        sole = sum(map(was_recorded, evidence.ranks.values())) == evidence.world_size - 1
        return _of("unseen", gone, roots, aligned, named=sole)
    event = min(roots, key=lambda e: (roots[e].time, e[1]))
    return Frontier(call=roots[event], group=aligned.schedules[event[0]].group)


def _of(
    basis: str,
    found: Mapping[Event, tuple[int, ...]],
    roots: Mapping[Event, Collective],
    aligned: Aligned,
    named: bool = True,
) -> Frontier:
    """The ranks that are suspect at every place. Without ``named`` they are not named: where
    several left no evidence, most of them were merely not collected."""
    event = min(found, key=lambda e: (roots[e].time, e[1]))
    group = aligned.schedules[event[0]].group
    suspects = tuple(sorted(set.intersection(*map(set, found.values()))))
    unseen = tuple(sorted(set().union(*found.values()))) if basis == "unseen" else ()
    ahead = tuple(sorted(set(group.ranks) - set(found[event])))
    return Frontier(basis, suspects if named else (), roots[event], group, ahead, unseen=unseen)


def _unseen(aligned: Aligned, evidence: Evidence, event: Event) -> tuple[int, ...]:
    members = aligned.schedules[event[0]].group.ranks
    gone = tuple(
        rank
        for rank in members
        if rank not in evidence.ranks or not was_recorded(evidence.ranks[rank])
    )
    return gone if 2 * len(gone) <= len(members) else ()


def _lagging(aligned: Aligned, event: Event) -> tuple[int, ...]:
    """Ranks whose device is behind the others' in the call."""
    schedule, position = aligned.schedules[event[0]], event[1]
    levels = {
        rank: 2 if call.completed else 1 if call.started else 0
        for rank in schedule.starts
        if (call := schedule.at(rank, position)) is not None
    }
    low, high = min(levels.values(), default=2), max(levels.values(), default=2)
    behind = tuple(sorted(rank for rank, level in levels.items() if level == low))
    # "Not begun" after all before it completed is clear; "not completed" only for a few ranks.
    few = 2 * len(behind) < len(levels) or (low, high) == (0, 1)
    return behind if low < high and few else ()
