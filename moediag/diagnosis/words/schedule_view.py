"""The ranks' schedules around the first divergence, and the final state of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.schedules.align import Aligned, Schedule, was_recorded
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words.calls import addressed, describe
from moediag.evidence.model import Collective, Evidence, RankEvidence
from moediag.result import Lane, LaneCell, RankState, SideBySide
from moediag.result.wording import listed

BEFORE, AFTER = 3, 2  # calls shown on either side of the divergence
MOST_LANES = 6

_NO_CALL = LaneCell("no call", "none")
_UNKNOWN = LaneCell("not recorded", "unknown")


def side_by_side(
    divergence: Divergence, aligned: Aligned, culprits: Sequence[int], evidence: Evidence
) -> SideBySide:
    """Schedules by position on the divergence's group. If ranks are in calls of different groups,
    or in sends and receives, each rank's own calls around the one it reached."""
    key = divergence.group.name, divergence.group.ranks
    schedule = aligned.schedules.get(key)
    meets = divergence.kind not in ("order", "peer", "transfer") and schedule is not None
    if any(c is not None and c.op in ("send", "recv") for c in divergence.calls.values()):
        meets = False
    if meets and schedule is not None:
        rows, columns = _on_group(divergence, schedule)
        title = f"operations on {divergence.group.label}"
        at = rows.index(str(divergence.position))
    else:
        rows = [f"{n:+}" if n else "here" for n in range(-BEFORE, AFTER + 1)]
        columns = {
            rank: _own(evidence.ranks[rank], call)
            for rank, call in divergence.calls.items()
            if rank in evidence.ranks
        }
        title, at = "each rank's own calls", BEFORE
    for rank, carried in _carried(divergence).items():
        if rank in columns:  # nothing else tells these calls apart
            cells = list(columns[rank])
            cells[at] = replace(cells[at], text=f"{cells[at].text}, {carried}")
            columns[rank] = tuple(cells)
    lanes, left_out = _lanes(columns, set(culprits))
    calls = {str(r): None if c is None else c.index for r, c in sorted(divergence.calls.items())}
    return SideBySide(title, tuple(rows), at, lanes, left_out, calls)


def _carried(divergence: Divergence) -> dict[int, str]:
    """For calls of equal size: what each rank's carries that another rank's does not."""
    if not divergence.silent:
        return {}
    carried = {rank: call.parameters or () for rank, call in divergence.calls.items() if call}
    common = set.intersection(*map(set, carried.values()))
    own = {rank: [p for p in of if p not in common] for rank, of in carried.items()}
    return {rank: f"with {listed(of)}" if of else "with nothing more" for rank, of in own.items()}


def _on_group(
    divergence: Divergence, schedule: Schedule
) -> tuple[list[str], dict[int, tuple[LaneCell, ...]]]:
    here = divergence.position
    end = max((schedule.end(rank) for rank in schedule.calls), default=here + 1)
    positions = range(max(0, here - BEFORE), max(min(end, here + AFTER + 1), here + 1))
    columns = {
        rank: tuple(_at(schedule, rank, position) for position in positions)
        for rank in sorted({*schedule.group.ranks, *divergence.calls})
    }
    return [str(position) for position in positions], columns


def _at(schedule: Schedule, rank: int, position: int) -> LaneCell:
    if rank not in schedule.calls:
        return _UNKNOWN
    call = schedule.at(rank, position)
    if call is None:
        return _NO_CALL if position >= schedule.end(rank) else _UNKNOWN
    return LaneCell(describe(call), "done" if call.completed else "open")


def _own(seen: RankEvidence, here: Collective | None) -> tuple[LaneCell, ...]:
    """The rank's calls around ``here``; its last ones if it made no call there."""
    calls = seen.collectives
    index = None if here is None else here.index
    at = next((i for i, c in enumerate(calls) if c.index == index), len(calls))
    cells = []
    for place in range(at - BEFORE, at + AFTER + 1):
        if not 0 <= place < len(calls):
            lost = place < 0 and bool(calls) and calls[0].index > 0
            cells.append(_UNKNOWN if lost or not was_recorded(seen) else _NO_CALL)
            continue
        call = calls[place]
        # Elsewhere the peer would only make ranks differ.
        text = addressed(call) if place == at else describe(call)
        state = "done" if call.completed else "open"
        cells.append(LaneCell(f"{text} on {seen.on(call)}", state))
    return tuple(cells)


def _lanes(
    columns: Mapping[int, tuple[LaneCell, ...]], culprits: set[int]
) -> tuple[tuple[Lane, ...], int]:
    """Ranks with equal columns share one; of many lanes, the culprits' and the largest."""
    lanes = [Lane(ranks, column) for column, ranks in agreement.sides(columns).items()]
    lanes.sort(key=lambda lane: (not culprits & {*lane.ranks}, -len(lane.ranks), lane.ranks))
    shown, rest = lanes[:MOST_LANES], lanes[MOST_LANES:]
    return tuple(sorted(shown, key=lambda lane: lane.ranks)), sum(len(x.ranks) for x in rest)


# ------------------------------------------------------------------------ at the end


def states(evidence: Evidence, failed: Iterable[Failure]) -> tuple[RankState, ...]:
    """Each rank's state when the job ended or was inspected; ranks in equal states together."""
    by_rank = {failure.rank: failure for failure in failed}
    waiting = {*evidence.stall.waiting} if evidence.stall is not None else set()
    together: dict[tuple[str, str], list[int]] = {}
    for rank in range(max(evidence.world_size, max(evidence.ranks, default=-1) + 1)):
        seen = evidence.ranks.get(rank)
        state = ("unseen", "nothing found")
        if seen is not None:
            state = _state(seen, by_rank.get(rank), evidence, rank in waiting)
        together.setdefault(state, []).append(rank)
    return tuple(RankState(kind, text, tuple(who)) for (kind, text), who in together.items())


def _state(
    seen: RankEvidence, failure: Failure | None, evidence: Evidence, waiting: bool
) -> tuple[str, str]:
    if failure is not None:
        raised = bool(failure.message or failure.where)
        text = f"raised {failure.name}" if raised else f"ended by {failure.name}"
        return "failed", text + (" (the communication library)" if failure.consequence else "")
    if waiting:
        # Other tools do not show for which call a rank waits, but a device runs them in order.
        opened = (c for c in seen.collectives if not c.completed)
        call = next((c for c in opened if evidence.foreign or not c.asynchronous), None)
        if call is None:
            return "waiting", "waiting"
        return "waiting", f"waiting in {call.op} on {seen.on(call)}"
    if evidence.stall is not None and seen.rank in evidence.stall.elsewhere:
        return "elsewhere", "in no operation"
    if seen.ended_well:
        return "finished", "finished"
    if seen.exit is not None and seen.exit.by_us:
        return "ended", "ended with the others"
    return "ended", "no end was seen"
