"""Finds calls that met calls from another place of the program or of another step.

Collectives of equal size match, wherever they were made. If one rank evaluates alone, its calls
meet the training calls of the others, nothing fails, and the ranks stop much later, in calls that
are right. The recorded places and training steps show it: with the surplus calls, calls of
different steps met; without them, all ranks made the same calls in each step. The program's text
shows it too: the first call that met one from another place is in a branch for its rank alone, and
from there on calls of one place did not meet again.

After one extra micro-batch the same calls meet, with contents of different steps (:func:`ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moediag.diagnosis.schedules import matching
from moediag.diagnosis.schedules.align import Aligned, Schedule
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Collective, Condition, Evidence
from moediag.records import dataclass
from moediag.result.wording import by_value, does

LEAST = 3  # calls that the ranks must have made alike


def before(found: Divergence, aligned: Aligned, evidence: Evidence) -> Divergence:
    """The first call that only some ranks made, if such calls explain ``found``; else ``found``."""
    if found.kind in ("order", "splits", "peer", "transfer"):
        return found
    schedule = next((s for s in aligned.schedules.values() if s.group == found.group), None)
    made = _made(schedule) if schedule is not None else {}
    odd = _odd(made, found.position)
    # At ``found.position`` it is the call that was found.
    if not odd or min(odd.values()) >= found.position:
        return found
    if not (_right_without(made) or _branch_of_one(made, odd, found, evidence)):
        return found
    others = tuple(rank for rank in made if rank not in odd)
    calls: dict[int, Collective | None] = dict.fromkeys(others)
    calls |= {rank: made[rank][place] for rank, place in odd.items()}
    ended = tuple(rank for rank in others if rank in found.ended)
    return Divergence("missing", found.group, min(odd.values()), calls, others, ended, surplus=True)


def _made(schedule: Schedule) -> Mapping[int, Sequence[Collective]]:
    """The calls of each rank; empty if part of the schedule, or a place, is not known."""
    made: dict[int, list[Collective]] = {}
    for rank, own in schedule.calls.items():
        made[rank] = [call for call in own if call is not None and call.site]
        if schedule.starts[rank] or len(made[rank]) < len(own):
            return {}
    return made


def _odd(made: Mapping[int, Sequence[Collective]], end: int) -> Mapping[int, int]:
    """Ranks that made calls before ``end`` from a place from which not all did, and the position of
    the first; empty if all did, or several such places are known."""
    common = _common(made)
    places = {rank: frozenset(c.place for c in own[:end]) - common for rank, own in made.items()}
    owners = [rank for rank, of in places.items() if of]
    if len(owners) == len(made) or len({places[rank] for rank in owners}) > 1:
        return {}
    return {r: next(i for i, c in enumerate(made[r]) if c.place not in common) for r in owners}


def _common(made: Mapping[int, Sequence[Collective]]) -> frozenset[object]:
    places = (frozenset(c.place for c in own) for own in made.values())
    return frozenset.intersection(*places) if made else frozenset()


def _right_without(made: Mapping[int, Sequence[Collective]]) -> bool:
    """Whether without these calls all ranks made the same in each step, and with them calls of
    different steps met: else two branches may have calls that are meant to meet."""
    common = _common(made)
    kept = [
        [(matching.key(c), c.place, c.step) for c in own if c.place in common]
        for own in made.values()
    ]
    length = min(map(len, kept))
    if length < LEAST or any(own[:length] != kept[0][:length] for own in kept):
        return False
    met = zip(*made.values(), strict=False)
    return any(len({call.step for call in together}) > 1 for together in met)


def _branch_of_one(
    made: Mapping[int, Sequence[Collective]], odd: Mapping[int, int], found: Divergence,
    evidence: Evidence,
) -> bool:  # fmt: skip
    """Whether the program has a branch for one rank around the first such call and none for the
    ranks whose calls it met, all places agreed until then, and none from there on."""
    if len(odd) != 1:
        return False
    ((owner, first),) = odd.items()
    same = [len({c.place for c in met}) == 1 for met in zip(*made.values(), strict=False)]
    if not LEAST <= first < len(same) or not all(same[:first]) or any(same[first : found.position]):
        return False
    others = {rank for rank in made if rank != owner}
    alone = any(
        c.side in ("under", "inline") and c.singles is not None and c.keeps_out >= others
        for c in _conditions(made[owner][first], owner, evidence)
    )
    return alone and not any(
        c.names_rank for rank in others for c in _conditions(made[rank][first], rank, evidence)
    )


def _conditions(call: Collective, rank: int, evidence: Evidence) -> Iterator[Condition]:
    known = evidence.ranks[rank].conditions
    return (c for line in (call.site, *call.callers) for c in known.get(line, ()))


@dataclass(frozen=True, slots=True)
class Ahead:
    """The first place on a group where calls of different steps met."""

    label: str
    position: int
    steps: dict[int, int]  # rank -> its training step there

    @property
    def sentence(self) -> str:
        low, high = min(self.steps.values()), max(self.steps.values())
        together = by_value(self.steps)
        first = does(together[high], f"was ahead, in step {high}")
        return (
            f"From operation {self.position} on {self.label} {first} while "
            f"{does(together[low], f'was in step {low}')}: the same operations met, and nothing "
            "reports that their contents belong to different steps."
        )


def ahead(aligned: Aligned, evidence: Evidence) -> Ahead | None:
    """The earliest such place on any group; None where steps agree or programs did not report
    them: the recorder's count of optimizer steps does not grow on a rank that skips one."""
    if not all(seen.last_phase.startswith("step ") for seen in evidence.ranks.values()):
        return None
    found = [one for s in aligned.schedules.values() if (one := _first(s)) is not None]
    return min(found, key=lambda one: one.position, default=None)


def _first(schedule: Schedule) -> Ahead | None:
    members = list(schedule.calls)
    if len(members) < 2:
        return None
    start = max(schedule.starts.values())
    end = min(schedule.end(rank) for rank in members)
    for position in range(start, end):
        calls = {rank: schedule.at(rank, position) for rank in members}
        steps = {rank: call.step for rank, call in calls.items() if call is not None}
        alike = len({(c.op, c.parameters) for c in calls.values() if c is not None}) == 1
        if not alike:
            return None  # the schedules diverged here: another fact
        if len(set(steps.values())) > 1 and 0 not in steps.values():
            return Ahead(schedule.group.label, position, steps)
    return None
