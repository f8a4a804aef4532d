"""What two releases answer differently: findings that appeared and those that went away. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from moediag.lab.campaign.hunt.findings import Finding, Hunt, HuntCell, Key, group
from moediag.protocol import WayOutcome
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """The later release beside the earlier one. Only confirmed differences appear or go away."""

    appeared: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    same: int
    """Ways of a relation that fail on both in the same way."""
    undecided: Mapping[Key, str]
    """What could not be compared, and why."""
    added: tuple[str, ...]
    """Families that only the later release has."""
    removed: tuple[str, ...]


def changes(now: Hunt) -> Changes:
    """Compares the cells with those of the release before, way by way. A family that one release
    lacks shows nothing there."""
    before = now.before
    assert before is not None
    undecided: dict[Key, str] = {}
    appeared: list[HuntCell] = []
    gone: list[HuntCell] = []
    same = 0
    for key in sorted({*now.cells, *before.cells}):
        reasons = [_unusable(hunt, key) for hunt in (now, before)]
        if any(reasons):
            undecided[key] = "; ".join(filter(None, reasons))
            continue
        ways = [_ways(hunt, key) for hunt in (now, before)]
        fresh: list[WayOutcome] = []
        stale: list[WayOutcome] = []
        for name in dict.fromkeys([*ways[0], *ways[1]]):
            one, two = (found.get(name) for found in ways)
            if one is not None and two is not None and _alike(one, two):
                same += one.confirmed or two.confirmed
                continue
            doubts = [*_doubt(one, now), *_doubt(two, before)]
            if doubts:
                undecided[key] = f"{name}: {'; '.join(doubts)}"
                continue
            fresh += [one] if one is not None and one.confirmed else []
            stale += [two] if two is not None and two.confirmed else []
        appeared += _reduced(now, key, fresh)
        gone += _reduced(before, key, stale)
    here, there = ({family.name for family in hunt.families} for hunt in (now, before))
    return Changes(
        tuple(group(appeared, now.register)), tuple(group(gone, now.register)), same, undecided,
        tuple(sorted(here - there)), tuple(sorted(there - here)),
    )  # fmt: skip


def version(hunt: Hunt) -> str:
    return str(hunt.versions.get("transformers"))


def _unusable(hunt: Hunt, key: Key) -> str:
    """Returns why the cell says nothing about this release, "" if it does or the release lacks the
    family."""
    family, _ = key
    cell = hunt.cells.get(key)
    if cell is not None and not cell.outcome.problem:
        return ""
    if cell is None and all(listed.name != family for listed in hunt.families):
        return ""
    why = hunt.not_built.get(family) or (cell.outcome.problem if cell else "not run")
    return f"{version(hunt)}: {why}"


def _ways(hunt: Hunt, key: Key) -> dict[str, WayOutcome]:
    cell = hunt.cells.get(key)
    return {} if cell is None else {way.way: way for way in cell.outcome.ways}


def _alike(one: WayOutcome, two: WayOutcome) -> bool:
    """Whether both fail in the same way."""
    return one.holds is two.holds is False and (one.kind, one.what) == (two.kind, two.what)


def _doubt(way: WayOutcome | None, hunt: Hunt) -> Iterator[str]:
    """Yields why it is not known whether ``way`` holds."""
    if way is not None and not way.holds and not way.confirmed:
        why = way.text if way.holds is None else way.failed or "checked in part"
        said = "not decided" if way.holds is None else "not confirmed"
        yield f"{said} on {version(hunt)}: {why}"


def _reduced(hunt: Hunt, key: Key, ways: list[WayOutcome]) -> Iterator[HuntCell]:
    """Yields the cell with these ways only."""
    if ways:
        cell = hunt.cells[key]
        yield dataclasses.replace(cell, outcome=dataclasses.replace(cell.outcome, ways=ways))
