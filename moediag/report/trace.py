"""Chrome-trace JSON of all ranks, for Perfetto: one process a rank, one thread a group.

The evidence has the time at which a call began but not when it ended, so a completed call is
drawn until the rank's next call and one that never completed until the end of the trace; both
say so in their ``args``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moediag.evidence.model import Collective, Evidence, RankEvidence
from moediag.report.model import FirstDivergence

Event = dict[str, Any]


def render(trials: Mapping[str, tuple[Evidence, FirstDivergence | None]]) -> str:
    """``trials``: by name, the evidence and where its ranks diverged. Timestamps in us."""
    events: list[Event] = []
    for number, (name, (evidence, divergence)) in enumerate(trials.items()):
        events += _trial(name, number * 10_000, evidence, divergence)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _trial(
    name: str, first_pid: int, evidence: Evidence, divergence: FirstDivergence | None
) -> list[Event]:
    times = [c.time for r in evidence.ranks.values() for c in r.collectives]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    end += max((end - begin) * 0.05, 1e-3)  # room to see what began last and never ended
    events: list[Event] = []
    for rank, found in sorted(evidence.ranks.items()):
        pid = first_pid + rank
        events.append(_meta("process_name", pid, 0, f"{name} rank {rank}"))
        events.append({**_meta("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}})
        threads = {group: i for i, group in enumerate(found.groups, start=1)}
        for group, tid in threads.items():
            events.append(_meta("thread_name", pid, tid, found.groups[group].label))
        events += _calls(found, pid, threads, begin, end, divergence)
    return events


def _calls(
    found: RankEvidence,
    pid: int,
    threads: Mapping[str, int],
    begin: float,
    end: float,
    divergence: FirstDivergence | None,
) -> list[Event]:
    events: list[Event] = []
    calls = sorted(found.collectives, key=lambda c: c.time)
    for call, after in zip(calls, [*calls[1:], None], strict=True):
        until = after.time if call.completed and after else end
        place = {"pid": pid, "tid": threads.get(call.group, 0), "ts": _us(call.time - begin)}
        marked = _is_divergence(call, found, divergence)
        event = {
            **place,
            "ph": "X",
            "name": f"{call.op} {call.module}".strip(),
            "cat": call.phase,
            "dur": max(_us(until - call.time), 1),
            "args": _args(call),
        }
        if marked:
            event["cname"] = "terrible"
            events.append({**place, "ph": "i", "s": "p", "name": "first divergence"})
        events.append(event)
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
    if call.parameters_missing:
        args["parameters missing"] = list(call.parameters_missing)
    return args


def _is_divergence(call: Collective, found: RankEvidence, at: FirstDivergence | None) -> bool:
    if at is None or call.position != at.index:
        return False
    group = found.groups.get(call.group)
    return at.axis in (call.group, group.label if group else "")


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
