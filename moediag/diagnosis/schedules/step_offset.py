"""Finds ranks whose collectives meet while they are in different training steps.

After one extra micro-batch, a rank's collectives pair with those of the other ranks' next step.
Kind, size and parameters agree, so nothing stops until a rank runs out of calls; until then
gradients of different steps are added.
"""

from __future__ import annotations

from moediag.diagnosis.schedules.align import Aligned, Schedule
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result.wording import ranks


@dataclass(frozen=True, slots=True)
class Ahead:
    """The first place on a group where calls of different steps met."""

    label: str
    position: int
    steps: dict[int, int]  # rank -> its training step there

    @property
    def sentence(self) -> str:
        low, high = min(self.steps.values()), max(self.steps.values())
        first = [rank for rank, step in self.steps.items() if step == high]
        rest = ranks(rank for rank, step in self.steps.items() if step == low)
        verb = "was" if len(first) == 1 else "were"
        return (
            f"From operation {self.position} on {self.label} {ranks(first)} {verb} ahead, in step "
            f"{high} while {rest} {'was' if rest.startswith('rank ') else 'were'} in step {low}: "
            "the same operations met, and nothing reports that their contents belong to different "
            "steps."
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
