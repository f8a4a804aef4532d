"""How far each group got, from the ``pg_status`` of a Flight Recorder dump.

Its keys are ``pg_id``, the number of the group's object in its process. Entries give the name of a
``pg_id``; a group without entries is identified by order, because a process numbers its groups in
the order of their creation, and torch names them by a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moediag.protocol import natural

Counts = tuple[int, int]  # issued, completed


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
