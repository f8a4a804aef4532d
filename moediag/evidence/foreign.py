"""What other tools recorded of one job, as one `Evidence`: dumps, stacks, error files and logs.

No watchdog saw this job, so a stall is inferred. A rank waits if one of its calls did not complete,
if its stack is inside a collective, or if the library gave up on a call. A rank is elsewhere if all
its recorded calls completed while other ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from moediag.evidence import console_output, exits, flight_recorder, log_reports, rank_stacks
from moediag.evidence.model import (
    Collective,
    Evidence,
    ExitStatus,
    Group,
    RankError,
    RankEvidence,
    Stack,
    Stall,
)
from moediag.evidence.sources import Found

# Seconds. A dump written sooner than this after the youngest call shows calls in flight.
IN_FLIGHT = 2.0


def evidence(found: Found) -> Evidence:
    """The evidence in ``found``; a rank without any has no entry."""
    writers = {one.rank for one in found.reports if one.rank is not None}
    seen_ranks = {
        *found.dumps, *found.stacks, *found.errors, *found.outputs, *found.exits, *writers,
    }  # fmt: skip
    least = max(max(seen_ranks, default=-1) + 1, log_reports.job_size(found.reports))
    recorded = flight_recorder.recorded(found.dumps, least)
    waited = {o.rank for o in found.reports if o.kind in log_reports.WAITED and o.rank is not None}
    ranks: dict[int, RankEvidence] = {}
    for rank in sorted(seen_ranks):
        own = recorded.ranks.get(rank) or _from_watchdog(rank, found)
        error, end = _end(found, rank)
        if error is not None and (
            console_output.gave_up_waiting(error)
            or (rank in waited and error.type.endswith("DistBackendError"))
        ):
            waited.add(rank)
            error = None
        if rank in waited and end is not None:
            end = ExitStatus(end.code, end.signal, by_us=True)  # its watchdog ended it
        ranks[rank] = _with(own, found, error, end)
    not_seen = [*found.refused, *recorded.not_seen]
    stall = _stall(found, ranks, waited, recorded, not_seen)
    if (unseen := [r for r in range(recorded.world_size) if r not in ranks]) and ranks:
        not_seen.append(_unseen(unseen))
    return Evidence(
        world_size=recorded.world_size,
        ranks=ranks,
        backend=recorded.backend,
        stall=stall,
        deaths=found.first,
        not_seen=tuple(dict.fromkeys(not_seen)),
        foreign=True,
        reports=tuple(dict.fromkeys(found.reports)),
    )


def _with(
    own: RankEvidence, found: Found, error: RankError | None, end: ExitStatus | None
) -> RankEvidence:
    text = found.outputs.get(own.rank, "")
    return RankEvidence(
        rank=own.rank,
        collectives=own.collectives,
        groups=own.groups,
        versions=own.versions,
        stacks=tuple(found.stacks.get(own.rank, ())),
        exit=end,
        error=error,
        not_seen=own.not_seen,
        last_lines=exits.last_lines(text),
        counts_apart=own.counts_apart,
    )


def _end(found: Found, rank: int) -> tuple[RankError | None, ExitStatus | None]:
    """The rank's exception, from its error file or its output, and how the process ended."""
    error = found.errors.get(rank) or exits.error_in_output(found.outputs.get(rank, ""))
    return error, found.exits.get(rank)


def _from_watchdog(rank: int, found: Found) -> RankEvidence:
    """Evidence of a rank without a dump among ranks with dumps: the calls that its watchdog gave up
    on. Without any dump, the reports are compared instead."""
    calls: dict[tuple[str, int], Collective] = {}
    groups: dict[str, Group] = {}
    for one in found.reports if found.dumps else ():
        if one.kind == "timeout" and one.rank == rank and one.group and one.seq:
            groups[one.group] = Group(one.group, (), desc=one.desc)
            call = Collective(
                index=one.seq,  # not 0: earlier calls are unknown
                group=one.group,
                position=one.seq - 1,
                op=one.op,
                numel_in=one.numel_in or 0,
                numel_out=one.numel_out or 0,
                dtype="",
                asynchronous=True,
            )
            calls.setdefault((one.group, one.seq), call)
    return RankEvidence(rank, tuple(calls.values()), groups, counts_apart=True)


# ------------------------------------------------------------------------ the stall


def _stall(
    found: Found,
    ranks: Mapping[int, RankEvidence],
    waited: set[int],
    recorded: flight_recorder.Recorded,
    not_seen: list[str],
) -> Stall | None:
    waiting, elsewhere = set(waited), set()
    for rank, seen in ranks.items():
        if rank in waited or seen.error is not None:
            continue
        stack = rank_stacks.that_counts(seen.stacks)
        inside = stack is not None and rank_stacks.in_collective(stack)
        dump = found.dumps.get(rank)
        if inside or any(not call.completed for call in seen.collectives):
            waiting.add(rank)
        elif dump is not None:
            if dump.recording and recorded.tracked:
                elsewhere.add(rank)
        elif stack is not None and _is_elsewhere(stack):
            elsewhere.add(rank)
    if not waiting:
        return None
    if not waited and found.dumps and _in_flight(found, ranks, recorded):
        not_seen.append(
            "whether the job was stalled: the dumps were written while calls were in flight "
            "(dump again a minute later)"
        )
        return None
    return Stall(0.0, 0.0, tuple(sorted(waiting)), tuple(sorted(elsewhere)))


def _is_elsewhere(stack: Stack) -> bool:
    """Whether the program is certainly outside communication: not in autograd, whose C++ code may
    wait for it, nor for a device. Native frames alone do not tell."""
    python = any(not frame.native for frame in stack.frames)
    return python and not (rank_stacks.on_the_device(stack) or rank_stacks.in_backward(stack))


def _in_flight(
    found: Found, ranks: Mapping[int, RankEvidence], recorded: flight_recorder.Recorded
) -> bool:
    """Whether all open calls were issued just before the dumps were written."""
    opened = [c.time for seen in ranks.values() for c in seen.collectives if not c.completed]
    age = found.written - min(opened, default=0.0)
    return 0 <= age < IN_FLIGHT and not found.stacks and recorded.last > 0


def _unseen(ranks: list[int]) -> str:
    """The ranks without evidence by number, or only their count if there are many."""
    if len(ranks) > 16:
        return f"{len(ranks):,} ranks: no evidence found"
    if len(ranks) == 1:
        return f"rank {ranks[0]}: no evidence found"
    return f"ranks {', '.join(map(str, ranks))}: no evidence found"
