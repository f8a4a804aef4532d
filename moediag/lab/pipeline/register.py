"""The register of findings that upstream knows or documents as a choice, or that a hunt found and
nobody reported: ``known.yaml``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moediag.axes import DP_SHARD
from moediag.errors import UsageError
from moediag.protocol import WayOutcome, build
from moediag.records import dataclass

REGISTER = Path(__file__).with_name("known.yaml")
OF_LAYOUTS = ("layouts", "generate")  # relations whose ways are layouts
_AXES = {"fsdp": str(DP_SHARD)}  # first words of ways that are not the axis
_STATES = ("known", "by-design", "unreported")


@dataclass(frozen=True, slots=True)
class Entry:
    """One finding. Empty ``families``, ``ways`` and ``what`` match any."""

    relations: tuple[str, ...]
    status: str  # known | by-design | unreported
    where: str  # link, the place in the library's documentation, or the page in reports/found
    summary: str
    families: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    what: str = ""
    since: str = ""
    fixed: str = ""

    def matches(self, relation: str, family: str, way: WayOutcome) -> bool:
        return (
            relation in self.relations
            and family in (self.families or (family,))
            and way.way in (self.ways or (way.way,))
            and self.what in ("", way.what)
        )

    def concerns(self, family: str, axes: Collection[str]) -> bool:
        """Whether a job with this model and these mesh axes may meet it. A layout's way begins with
        its axis (``tp-size``); other findings concern the families that they name."""
        of_layouts = not {*self.relations}.isdisjoint(OF_LAYOUTS)
        ways = [way.partition("-")[0] for way in self.ways]
        here = not ways or not of_layouts or any(_AXES.get(way, way) in axes for way in ways)
        named = family in self.families or (not self.families and of_layouts)
        return named and here


def read(path: Path = REGISTER) -> tuple[Entry, ...]:
    """Raises ScenarioError or UsageError for a file that cannot be used, with the number of the
    entry."""
    from moediag.lab.scenario.source import parsed

    raw = parsed(path, "safe")
    if not isinstance(raw, list):
        raise UsageError(f"{path}: not a list of entries")
    return tuple(_entry(path, number, one) for number, one in enumerate(raw, 1))


def _entry(path: Path, number: int, raw: Any) -> Entry:
    at = f"{path}: entry {number}"
    if not isinstance(raw, Mapping):
        raise UsageError(f"{at} is not a mapping")
    unknown = raw.keys() - {f.name for f in dataclasses.fields(Entry)}
    try:
        if unknown:
            raise ValueError(f"unknown fields {', '.join(sorted(map(str, unknown)))}")
        entry: Entry = build(Entry, raw)
    except ValueError as error:
        raise UsageError(f"{at}: {error}") from error
    if entry.status not in _STATES:
        raise UsageError(f"{at}: status {entry.status!r} is none of {', '.join(_STATES)}")
    return entry
