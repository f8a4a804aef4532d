"""Finds which divergences of one job are independent: dumps often show several faults at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.schedules import matching
from moediag.diagnosis.schedules.diverge import Divergence, earliest


def independent(
    candidates: Sequence[Divergence], blame_of: Callable[[Divergence], Blame]
) -> tuple[tuple[Divergence, Blame], ...]:
    """The first candidate, and those that the ones before do not explain, with their culprits.

    Where calls do not match, its ranks have no part in those before, or at least the ranks named
    there have none. Where a call is missing, its absent rank is another one, and ranks wait for it
    that made no unmatched call before.
    """
    unmatched = earliest(one for one in candidates if one.kind != "missing")
    found = [(one, blame_of(one)) for one in candidates[:1]]
    for candidate in candidates[1:]:
        gone = {rank for one, _ in found for rank in one.absent}
        made = {rank for one, _ in found if one.kind != "missing" for rank in one.calls}
        calls = {rank: call.index for rank, call in candidate.calls.items() if call is not None}
        if candidate.kind == "missing":
            rightly = any(at < unmatched.get(rank, math.inf) for rank, at in calls.items())
            if rightly and set(candidate.absent) - gone - made:
                found.append((candidate, blame_of(candidate)))
        elif not (gone | made) & calls.keys():
            found.append((candidate, blame_of(candidate)))
        elif candidate.kind in matching.KINDS:
            blamed = blame_of(candidate)
            if blamed.culprits and not (gone | made) & {*blamed.culprits}:
                found.append((candidate, blamed))
    return tuple(found)
