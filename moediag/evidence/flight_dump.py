"""Reads one dump of PyTorch's Flight Recorder (format 2.x, pickle or JSON).

A dump is a ring buffer of the last calls of one process. All differences between torch releases
and backends are handled here and in :mod:`moediag.evidence.flight_entries`. Known from torch's
``FlightRecorder.hpp`` and from real dumps (torch 2.13, gloo):

- ``onlyActive`` leaves completed calls out; JSON then has no ``entries`` at all if nothing is open.
- ``pg_config`` is empty on gloo.
- ``pg_status`` counts the calls of each group that were enqueued and completed. Its keys are
  ``pg_id``, the number of the group's object in its process, which the entries translate to names;
  a group without entries is identified by order, because a process numbers its groups in the order
  of their creation, and torch names them by a counter. It counts sends and receives separately, but
  shows the number of whichever came last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from moediag.evidence.flight_calls import COMPLETED, SCHEDULED, Dump, Kind, NoDump, OwnGroup
from moediag.evidence.flight_entries import Entries
from moediag.evidence.flight_kinds import group_desc
from moediag.evidence.flight_names import plain_text
from moediag.protocol import natural

MAX_ENTRIES = 1_000_000
_MOST_UNSEEN = 1000  # open calls of a group that only pg_status counts
_MAX_MEMBERS = 3_000_000  # of all groups together
Counts = tuple[int, int]  # issued, completed


def is_dump(raw: Any) -> bool:
    """Whether plain data looks like a dump."""
    return (
        isinstance(raw, dict)
        and ("entries" in raw or "pg_config" in raw)
        and isinstance(raw.get("entries", []), list)
        and isinstance(raw.get("pg_config", {}), dict)
        and ("pg_config" in raw or _is_entry(next(iter(raw["entries"]), None)))
    )


def _is_entry(raw: Any) -> bool:
    return isinstance(raw, dict) and "profiling_name" in raw


def read(raw: Any) -> Dump:
    """The dump as columns. Invalid entries are only counted. Raises NoDump."""
    if not is_dump(raw):
        raise NoDump("neither entries nor pg_config")
    version = plain_text(raw.get("version"))[:40]
    if version and version.partition(".")[0] not in ("1", "2"):
        raise NoDump(f"format {version}; 2.x is supported")
    entries = raw.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise NoDump(f"{len(entries):,} entries; at most {MAX_ENTRIES:,} are read")
    dump = Dump(version, library=plain_text(raw.get("comm_lib_version"))[:40])
    members = 0
    for name, config in raw.get("pg_config", {}).items():
        if isinstance(config, Mapping):
            own = plain_text(config.get("name", name)) or plain_text(name)
            ranks = _ranks(config.get("ranks"))
            members += len(ranks)
            if members > _MAX_MEMBERS:
                raise NoDump("more members of groups than any job has")
            if own or ranks:  # gloo of torch 2.11-2.13 writes one group without a name
                dump.groups[own] = OwnGroup(group_desc(config.get("desc")), ranks)
    reader = Entries(dump)
    reader.add(entries)
    told = raw.get("pg_status")
    dump.status = of_groups(told, reader.kinds.ids, dump.groups)
    dump.recording = "entries" in raw or not told or bool(dump.status)
    if dump.recording:
        _without_entries(dump, "entries" in raw)
    return dump


def _without_entries(dump: Dump, included: bool) -> None:
    """What ``pg_status`` says of a dump that shows no completed call, or no call at all."""
    issued = any(of[0] > 0 for of in dump.status.values())
    open_ = {name: of for name, of in dump.status.items() if of[0] > of[1]}
    if not included and open_:
        dump.recording = False
        for name, (last, done) in open_.items():
            number = len(dump.kinds)
            dump.kinds.append(Kind(name, "", 0, 0, ""))
            for position in range(done, min(last, done + _MOST_UNSEEN)):
                dump.index.append(len(dump.index) + 1)
                dump.position.append(position)
                dump.created.append(0)
                dump.kind.append(number)
                dump.state.append(SCHEDULED)
    elif COMPLETED not in dump.state and issued and (not dump.kind or dump.index[0] > 0):
        dump.open_only = True


def _ranks(value: Any) -> tuple[int, ...]:
    """``"[0, 1]"`` or a list."""
    if isinstance(value, str):
        return _parsed(value)
    if not isinstance(value, list | tuple) or not all(type(rank) is int for rank in value):
        return ()
    return tuple(value) if all(0 <= rank < 1 << 20 for rank in value) else ()


@lru_cache(maxsize=20_000)
def _parsed(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,6}", text[:8_000_000]))


def of_groups(raw: Any, ids: Mapping[str, Any], names: Iterable[str]) -> dict[str, Counts]:
    """By the process's own name of a group, calls issued and completed.

    ``ids``: the ``pg_id`` of each name that has entries. ``names``: all groups.
    """
    found = {}
    for key, status in raw.items() if isinstance(raw, Mapping) else ():
        number = _count(key)
        if number is not None and isinstance(status, Mapping):
            issued = _count(status.get("last_enqueued_collective"))
            completed = _count(status.get("last_completed_collective"))
            if issued is not None and completed is not None:
                found[number] = max(issued, 0), max(completed, 0)
    named = _names(found, {own: name for name, own in ids.items() if type(own) is int}, names)
    return {name: found[number] for number, name in named.items() if number in found}


def _names(
    found: Mapping[int, Counts], known: dict[int, str], names: Iterable[str]
) -> dict[int, str]:
    """The name of each ``pg_id``, as far as it is certain."""
    rest = [number for number in sorted(found) if number not in known]
    unknown = [name for name in names if name not in known.values()]
    numbers = {name: natural(name) for name in (*unknown, *known.values())}
    if not rest or None in numbers.values():
        return known | (
            dict(zip(rest, unknown, strict=True)) if len(rest) == len(unknown) == 1 else {}
        )
    every = sorted((*unknown, *known.values()), key=lambda name: numbers[name] or 0)
    if len(rest) == len(unknown):
        named = dict(zip(sorted((*rest, *known)), every, strict=True))
    elif max(found) < len(every):
        named = dict(enumerate(every))  # all groups of the process are listed
    else:
        return known
    return named if known.items() <= named.items() else known


def _count(value: Any) -> int | None:
    """A number, also as text: JSON writes both."""
    if type(value) is int:
        return value
    if not isinstance(value, str):
        return None
    number = natural(value.removeprefix("-"))
    return -number if number is not None and value[:1] == "-" else number
