"""What other tools recorded of one job, as one `Evidence`: dumps, stacks, error files and logs.

No watchdog saw this job, so a stall is inferred. A rank waits if one of its calls did not complete,
if its stack is inside a collective, or if the library gave up on a call. A rank is elsewhere if all
its recorded calls completed while other ranks wait. Whether calls stand still or were just under
way when the dumps were written is known only if something tells the time.
"""

from __future__ import annotations

from dataclasses import replace

from moediag.evidence import (
    console_output,
    exits,
    flight_recorder,
    log_reports,
    one_job,
    rank_stacks,
    told_ends,
)
from moediag.evidence.flight_calls import COMPLETED, Dump
from moediag.evidence.log_formats import meaning
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
from moediag.result.wording import ranks as of_ranks

# Seconds. A dump written sooner than this after the youngest call shows calls in flight.
IN_FLIGHT = 30.0
NO_WORLD_SIZE = "how many ranks the job has (no line says)"


def evidence(found: Found) -> Evidence:
    """The evidence in ``found``; a rank without any has no entry."""
    every = one_job.jobs(found.dumps)
    if len(every) > 1 and len(every[0].ranks) == len(every[1].ranks):
        return _mixed(found, every)
    found.dumps = {rank: found.dumps[rank] for job in every[:1] for rank in job.ranks}
    other = {rank for job in every[1:] for rank in job.ranks}
    writers = {one.rank for one in found.reports if one.rank is not None}
    seen_ranks = {
        *found.dumps, *found.stacks, *found.errors, *found.outputs, *found.exits, *writers,
    }  # fmt: skip
    told = _told_ends(found, seen_ranks)
    seen_ranks |= told.keys()
    least = max(max(seen_ranks | found.unread, default=-1) + 1, log_reports.job_size(found.reports))
    known = found.size >= least or log_reports.job_size(found.reports, True) >= least
    recorded = flight_recorder.recorded(found.dumps, max(least, found.size))
    waited = {o.rank for o in found.reports if meaning(o).waits and o.rank is not None}
    ranks: dict[int, RankEvidence] = {}
    for rank in sorted(seen_ranks):
        own = recorded.ranks.get(rank) or _from_watchdog(rank, found)
        error, end = _end(found, rank)
        end = end or told.get(rank)
        if error is not None and (
            console_output.gave_up_waiting(error)
            or (rank in waited and console_output.ended_a_wait(error))
        ):
            waited.add(rank)
            error = None
        if rank in waited and end is not None:
            end = ExitStatus(end.code, end.signal, by_us=True)  # its watchdog ended it
        ranks[rank] = _with(own, found, error, end)
    not_seen = [*found.refused, *one_job.others(every), *recorded.not_seen]
    stall = _stall(found, ranks, waited, recorded, not_seen)
    if stall is None and not found.reports and not found.exits:
        _without_handled(ranks, found, not_seen)
    unseen = sorted({*range(recorded.world_size)} - {*ranks} - {*other})
    known = known or bool(found.dumps)
    if unseen and ranks and known:
        not_seen.append(f"{of_ranks(unseen)}: no evidence found")
    elif ranks and not known:
        not_seen.append(NO_WORLD_SIZE)
    ended = any(one.error or one.exit for one in ranks.values())
    quiet = stall is None and not found.reports and not ended
    return Evidence(
        world_size=recorded.world_size,
        ranks=ranks,
        backend=recorded.backend,
        stall=stall,
        deaths=found.first,
        not_seen=tuple(dict.fromkeys(not_seen)),
        foreign=True,
        reports=tuple(dict.fromkeys(found.quoted if quiet else found.reports)),
        size_known=known,
    )


def _told_ends(found: Found, ranks: set[int]) -> dict[int, ExitStatus]:
    """How ranks ended, as launchers say, where that explains a failure."""
    errors = [_end(found, rank)[0] for rank in ranks]
    own = any(one is not None and not console_output.of_a_library(one) for one in errors)
    return told_ends.exits(found.reports, own or bool(found.exits))


def _without_handled(ranks: dict[int, RankEvidence], found: Found, not_seen: list[str]) -> None:
    """Drops exceptions behind which a rank printed progress, in a job that shows no failure."""
    for rank, seen in ranks.items():
        error = seen.error
        if error is not None and rank not in found.errors and exits.goes_on(found.outputs[rank]):
            at = f" at {error.where}" if error.where else ""
            not_seen.append(
                f"whether {error.type}{at} ended rank {rank}: its output continues after it"
            )
            ranks[rank] = replace(seen, error=None)


def _with(
    own: RankEvidence, found: Found, error: RankError | None, end: ExitStatus | None
) -> RankEvidence:
    return replace(
        own,
        stacks=tuple(found.stacks.get(own.rank, ())),
        exit=end,
        error=error,
        last_lines=exits.last_lines(found.outputs.get(own.rank, "")),
    )


def _end(found: Found, rank: int) -> tuple[RankError | None, ExitStatus | None]:
    """The rank's exception, from its error file or its output, and how the process ended."""
    error = found.errors.get(rank) or exits.error_in_excerpt(found.outputs.get(rank, ""))
    error = error or found.told.get(rank)
    if error is None:
        told = (one for one in found.reports if meaning(one).fault == "writer" and one.rank == rank)
        error = next((RankError("DistBackendError", one.detail) for one in told), None)
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
    ranks: dict[int, RankEvidence],
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
            if seen.groups and dump.recording and recorded.tracked:
                elsewhere.add(rank)
        elif stack is not None and _is_elsewhere(stack):
            elsewhere.add(rank)
    if not waiting:
        return None
    certain = bool(waited) or _stands(found)
    moved = found.moved and found.taken_at is None
    if moved and not waited:
        not_seen.append("whether the job stalled: it moved on between two dumps of a rank")
        return None
    if not certain and recorded.older:
        not_seen += recorded.older.values()
        return None
    for rank, text in recorded.older.items():
        ranks[rank] = RankEvidence(rank, stacks=ranks[rank].stacks, not_seen=(text,))
        waiting.discard(rank)
        elsewhere.discard(rank)
    at_once = _written(found) is not None and not certain
    return Stall(0.0, 0.0, tuple(sorted(waiting)), tuple(sorted(elsewhere)), certain, at_once)


def _is_elsewhere(stack: Stack) -> bool:
    """Whether the program is certainly outside communication: not in autograd, whose C++ code may
    wait for it, nor for a device. Native frames alone do not tell."""
    waits = rank_stacks.on_the_device(stack) or rank_stacks.in_backward(stack)
    return bool(stack.python) and not waits


def _stands(found: Found) -> bool:
    """Whether it is known that calls did not complete for long, and were not just under way."""
    dumps = found.dumps.values()
    issued = [dump.created[-1] / 1e9 for dump in dumps if dump.created and dump.created[-1]]
    opened = [at + dump.timeout for dump in dumps if (at := _first_open(dump)) and dump.timeout]
    if found.stacks or found.stood or any(dump.timed_out for dump in dumps):
        return True
    # A log beside the dumps, also where its lines do not tell the rank in the job.
    if any(meaning(o).fault == "positions" or o.kind == "stuck" for o in found.reports):
        return True
    newest, written = max(issued, default=0.0), _written(found)
    if written is not None and written - newest >= IN_FLIGHT:
        return True
    return bool(opened) and min(opened) <= max(newest, written or 0.0)


def _written(found: Found) -> float | None:
    """When the newest dump was written, in seconds, if the user or a dump tells."""
    told = max((dump.written for dump in found.dumps.values()), default=0)
    return found.taken_at if found.taken_at is not None else told / 1e9 or None


def _first_open(dump: Dump) -> float:
    """When the dump's first incomplete call was issued, in seconds; 0 if there is none."""
    first = len(dump.state) - len(dump.state.lstrip(bytes([COMPLETED])))
    return dump.created[first] / 1e9 if first < len(dump.state) else 0.0


def _mixed(found: Found, every: list[one_job.Job]) -> Evidence:
    who = " and ".join(of_ranks(job.ranks) for job in every)
    return Evidence(
        world_size=len(found.dumps),
        ranks={},
        not_seen=tuple(found.refused),
        mixed=f"The dumps of {who} are not of one job or attempt: {every[1].reason}.",
        foreign=True,
    )
