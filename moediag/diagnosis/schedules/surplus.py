"""Finds calls that met calls from another place of the program, and put the ranks out of step.

Collectives of equal size match, wherever they were made. If one rank evaluates alone, its calls
meet the training calls of the others, nothing fails, and the ranks stop much later, in calls that
are right. The recorded places and training steps show it: with the surplus calls, calls of
different steps met; without them, all ranks made the same calls in each step.
"""

from __future__ import annotations

from moediag.diagnosis.schedules import matching
from moediag.diagnosis.schedules.align import Aligned, Schedule
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Collective

LEAST = 3  # calls that the ranks must have made alike


def before(found: Divergence, aligned: Aligned) -> Divergence:
    """The first call that only some ranks made, if such calls explain ``found``; else ``found``."""
    for schedule in aligned.schedules.values():
        if schedule.group == found.group and found.kind not in ("order", "splits"):
            return _first(found, schedule) or found
    return found


def _first(found: Divergence, schedule: Schedule) -> Divergence | None:
    made: dict[int, list[Collective]] = {}
    for rank, own in schedule.calls.items():
        made[rank] = [call for call in own if call is not None and call.site]
        if schedule.starts[rank] or len(made[rank]) < len(own):
            return None  # part of the schedule, or a place, is not known
    places = {rank: frozenset(map(_place, own)) for rank, own in made.items()}
    common = frozenset.intersection(*places.values()) if places else frozenset()
    owners = tuple(rank for rank, of in places.items() if of - common)
    others = tuple(rank for rank in places if rank not in owners)
    if not owners or not others or len({places[rank] - common for rank in owners}) > 1:
        return None
    kept = [
        [(matching.key(c), _place(c), c.step) for c in own if _place(c) in common]
        for own in made.values()
    ]
    length = min(map(len, kept))
    if length < LEAST or any(own[:length] != kept[0][:length] for own in kept):
        return None
    met = zip(*made.values(), strict=False)
    if all(len({call.step for call in together}) == 1 for together in met):
        return None  # in step as they are: two branches whose calls are meant to meet
    at = {r: next(i for i, c in enumerate(made[r]) if _place(c) not in common) for r in owners}
    if min(at.values()) >= found.position:
        return None  # it is the call that was found
    calls: dict[int, Collective | None] = dict.fromkeys(others)
    calls |= {rank: made[rank][place] for rank, place in at.items()}
    ended = tuple(rank for rank in others if rank in found.ended)
    return Divergence("missing", found.group, min(at.values()), calls, others, ended, surplus=True)


def _place(call: Collective) -> tuple[str, tuple[str, ...]]:
    return call.site, call.callers
