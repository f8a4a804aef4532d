"""How far a rank's device got with the calls in our own log, from torch's Flight Recorder.

Our recorder writes each call before it is issued and knows its parameters, its module and its line,
but on an accelerator it learns late, or never, whether the call completed. torch's recorder has the
events around each NCCL kernel: issued, started, completed. Both keep the calls of a group in order,
so the n-th call of one is the n-th of the other; operation and sizes confirm it. Where they differ,
nothing is concluded, and ``not_seen`` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from moediag import protocol
from moediag.evidence import file_loading
from moediag.evidence.flight_calls import COMPLETED, STARTED, Dump, Kind
from moediag.evidence.model import COMPLETED_THERE, ISSUED, STARTED_THERE, Collective
from moediag.records import dataclass

_P2P = ("send", "recv")
_ROOTED = ("gather", "scatter", "broadcast", "reduce", "all_to_all", "barrier")  # sizes may differ
_SKEW = 3  # calls by which the ends of both records may differ


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's calls with what its device did."""

    calls: tuple[Collective, ...]
    #: Version of the communication library, or "".
    library: str = ""
    not_seen: tuple[str, ...] = ()


@dataclass(slots=True)
class RankDump:
    """One rank's dump, if it can be read, and what cannot be."""

    dump: Dump | None = None
    lost: tuple[str, ...] = ()


def read(folder: Path, ranks: Iterable[int]) -> dict[int, RankDump]:
    """The dump of each rank: the one requested at the stall, else the one NCCL's watchdog wrote."""
    found = {rank: RankDump() for rank in ranks}
    files = [
        (rank, folder / name)
        for rank in found
        for name in (protocol.flight_file(rank), protocol.watchdog_dump(rank))
        if (folder / name).is_file()
    ]
    contents = file_loading.loaded([path for _, path in files])
    for (rank, path), loaded in zip(files, contents, strict=True):
        of_rank = found[rank]
        if of_rank.dump is not None:
            continue
        if loaded.dump is None:
            reason = loaded.refused or "not a Flight Recorder dump"
            of_rank.lost += (f"rank {rank}: {path.name} ({reason})",)
        elif len(loaded.dump.kind):
            of_rank.dump, of_rank.lost = loaded.dump, ()
    return found


def told(calls: Sequence[Collective], dump: Dump, rank: int) -> Told:
    """``calls`` of one rank, with ``completed``, ``started`` and ``on_device`` from ``dump``.

    A call that completed for either side has completed. gloo has no device, and its recorder does
    not distinguish a completed call from a failed one.
    """
    if dump.backend in ("", "gloo"):
        return Told(tuple(calls))
    rows: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for row, number in enumerate(dump.kind):
        kind = dump.kinds[number]
        rows[kind.group, kind.op in _P2P].append(row)
    own: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        own[call.group, call.op in _P2P].append(place)
    result = list(calls)
    lost = []
    for key, places in own.items():
        if key not in rows:
            continue
        pairs = _pairs([calls[p] for p in places], rows[key], dump)
        if pairs is None:
            what = "sends and receives" if key[1] else "collectives"
            lost.append(
                f"rank {rank}: how far its device is in the {what} of group {key[0]} (torch's "
                "Flight Recorder and moediag's log hold different calls)"
            )
            continue
        later = False
        for at, row in reversed(pairs):
            state = dump.state[row]
            # The calls of one group run one after the other.
            later = later or (state == COMPLETED and not key[1])
            result[places[at]] = _with(result[places[at]], COMPLETED if later else state)
    return Told(tuple(result), dump.library, tuple(lost))


def _with(call: Collective, state: int) -> Collective:
    completed = call.completed or state == COMPLETED
    started = call.started or completed or state >= STARTED
    where = COMPLETED_THERE if completed else STARTED_THERE if started else ISSUED
    return replace(call, completed=completed, started=started, on_device=where)


def _pairs(
    calls: Sequence[Collective], rows: Sequence[int], dump: Dump
) -> list[tuple[int, int]] | None:
    """(index into ``calls``, row) of each call; None if the two records do not match."""
    kinds = [dump.kinds[dump.kind[row]] for row in rows]
    by_end = len(rows) - len(calls)
    shifts = [0] if not dump.wrapped and calls[0].index == calls[0].position == 0 else []
    if not dump.wrapped and calls[0].op not in _P2P:
        shifts.append(calls[0].position - dump.position[rows[0]])
    shifts += [by_end, *(by_end + n * sign for n in range(1, _SKEW + 1) for sign in (1, -1))]
    for shift in dict.fromkeys(shifts):
        both = [i for i in range(len(calls)) if 0 <= i + shift < len(rows)]
        if both and all(_alike(calls[i], kinds[i + shift]) for i in both):
            return [(i, rows[i + shift]) for i in both]
    return _batched(calls, rows, kinds)


def _batched(
    calls: Sequence[Collective], rows: Sequence[int], kinds: Sequence[Kind]
) -> list[tuple[int, int]] | None:
    """The same from the end, for collectives issued together, which torch counts as one."""
    pairs = []
    at = len(calls) - 1
    for row, kind in zip(reversed(rows), reversed(kinds), strict=True):
        total, first = 0, at
        while first >= 0 and total < kind.numel_in:
            total += calls[first].numel_in
            first -= 1
        first = min(first, at - 1)  # a barrier carries nothing
        if at < 0:
            break
        alone = at - first == 1
        fits = _alike(calls[at], kind) if alone else total == kind.numel_in
        if not fits:
            return None
        pairs += [(i, row) for i in range(at, first, -1)]
        at = first
    return pairs[::-1] or None


def _alike(call: Collective, kind: Kind) -> bool:
    if call.op != kind.op:
        return False
    same = call.numel_in == kind.numel_in or call.numel_out == kind.numel_out
    return same or call.op in _ROOTED
