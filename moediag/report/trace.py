"""Chrome-trace JSON of all ranks, for Perfetto: one process per rank, one thread per group.

The evidence has the start time of a call but not its end. So a completed call is drawn until the
rank's next call, and an incomplete one until the end of the trace; both say so in their ``args``.
Each rank's clock is its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moediag.evidence.model import Collective, Evidence, RankEvidence
from moediag.records import dataclass
from moediag.result import FirstDivergence, TrialResult

Event = dict[str, Any]

MOST_CALLS = 400_000  # per trace, about 150 MB; older ones are omitted, with a note
FEWEST_CALLS = 64  # per rank
MOST_RANKS = 100_000  # drawn without evidence
MARK = "first divergence"


@dataclass(frozen=True, slots=True)
class Traced:
    """The evidence of one trial, and the part of its diagnosis that a trace shows."""

    evidence: Evidence
    divergence: FirstDivergence | None = None
    calls: Mapping[str, int | None] | None = None
    """Rank -> index of its diverging call, None if it made none. Older results have no calls; then
    the divergence's position on its group is used."""
    culprits: Sequence[int] = ()
    victims: Sequence[int] = ()


def traced(evidence: Evidence, trial: TrialResult) -> Traced:
    found = trial.diagnosis
    calls = found.schedules.calls if found.schedules is not None else None
    return Traced(evidence, found.first_divergence, calls, found.culprits, found.victims)


def render(trials: Mapping[str, Traced]) -> str:
    """Returns the trace. ``trials``: by name. Timestamps in us."""
    events: list[Event] = []
    left_out = 0
    total = sum(len(trial.evidence.ranks) for trial in trials.values())
    most = max(MOST_CALLS // max(total, 1), FEWEST_CALLS)
    first_pid = 0
    for name, trial in trials.items():
        events += _trial(name, first_pid, trial, most)
        ranks = trial.evidence.ranks.values()
        left_out += sum(max(len(found.collectives) - most, 0) for found in ranks)
        first_pid += max(10_000, trial.evidence.world_size)
    whole: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if left_out:
        whole["otherData"] = {"left out": f"{left_out:,} calls: the {most:,} newest of each rank"}
    return json.dumps(whole) + "\n"


def _trial(name: str, first_pid: int, trial: Traced, most: int) -> list[Event]:
    evidence = trial.evidence
    times = [c.time for r in evidence.ranks.values() for c in r.collectives[-most:]]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    end += max((end - begin) * 0.05, 1e-3)  # space to show the last call, which never ended
    events: list[Event] = []
    for rank in sorted({*evidence.ranks, *_absent(evidence)}):
        pid = first_pid + rank
        found = evidence.ranks.get(rank)
        seen = "" if found is not None else " (nothing was found)"
        events.append(_meta("process_name", pid, 0, f"{name} rank {rank}{seen}"))
        events.append({**_meta("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}})
        kind = "culprit" if rank in trial.culprits else "victim" if rank in trial.victims else ""
        if kind:
            labels = {"args": {"labels": kind}}
            events.append({**_meta("process_labels", pid, 0, ""), **labels})
        if found is None:
            continue
        threads = {group: i for i, group in enumerate(found.groups, start=1)}
        for group, tid in threads.items():
            events.append(_meta("thread_name", pid, tid, found.groups[group].label))
        events += _calls(found, pid, threads, (begin, end), trial, most)
    return events


def _absent(evidence: Evidence) -> Sequence[int]:
    """Ranks of which nothing was found; none if a damaged dump claims more than any job has."""
    return range(evidence.world_size if evidence.world_size <= MOST_RANKS else 0)


def _calls(
    found: RankEvidence,
    pid: int,
    threads: Mapping[str, int],
    span: tuple[float, float],
    trial: Traced,
    most: int,
) -> list[Event]:
    events: list[Event] = []
    begin, end = span
    calls = sorted(found.collectives[-most:], key=lambda c: c.time)
    for call, after in zip(calls, [*calls[1:], None][: len(calls)], strict=True):
        until = after.time if call.completed and after else end
        place = {"pid": pid, "tid": threads.get(call.group, 0), "ts": _us(call.time - begin)}
        event = {
            **place,
            "ph": "X",
            "name": f"{call.op} {call.module}".strip(),
            "cat": call.phase,
            "dur": max(_us(until - call.time), 1),
            "args": _args(call),
        }
        if _is_divergence(call, found, trial):
            event["cname"] = "terrible"
            events.append({**place, "ph": "i", "s": "p", "name": MARK})
        events.append(event)
    if trial.calls is not None and trial.calls.get(str(found.rank), 0) is None:
        # It did not make the call that others made: the position is after its last one.
        last = _us(calls[-1].time - begin) + 1 if calls else 0
        text = {"name": MARK, "args": {"call": "none was made"}}
        events.append({"pid": pid, "tid": 0, "ts": last, "ph": "i", "s": "p", **text})
    return events


def _args(call: Collective) -> dict[str, Any]:
    drawn = "until the rank's next call" if call.completed else "never completed: to the end"
    args: dict[str, Any] = {
        "index": call.index,
        "position in group": call.position,
        "elements in": call.numel_in,
        "elements out": call.numel_out,
        "dtype": call.dtype,
        "step": call.step,
        "site": call.site,
        "drawn": drawn,
    }
    if call.peer is not None:
        args["peer"] = call.peer
    if call.parameters_missing:
        args["parameters missing"] = list(call.parameters_missing)
    return args


def _is_divergence(call: Collective, found: RankEvidence, trial: Traced) -> bool:
    if trial.calls is not None:
        return trial.calls.get(str(found.rank)) == call.index
    at = trial.divergence
    if at is None or call.position != at.index:
        return False
    group = found.groups.get(call.group)
    return at.axis in (call.group, group.label if group else "")


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
