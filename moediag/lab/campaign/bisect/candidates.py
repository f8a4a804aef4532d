"""Selects the releases of a package to search, and the newest companion on a given day."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timedelta

from packaging.version import InvalidVersion, Version

from moediag.errors import NoSuchRelease
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.releases import Release
from moediag.lab.stacks.resolve import cutoff_of

REACH = timedelta(days=2 * 365)  # do not search releases older than this before the bad end


def as_of(package: str, moment: datetime | None, python: str) -> str | None:
    """Returns the newest final release of ``package`` at the end of ``moment``'s day, or None
    without upload dates."""
    if moment is None:
        return None
    end = cutoff_of([moment])
    found = [
        r.version
        for r in index.releases(package)
        if r.uploaded is not None and r.uploaded < end and not r.yanked and not r.prerelease
        and index.supports(r, python)
    ]  # fmt: skip
    return found[-1] if found else None


def spelled(package: str, version: str, listed: Sequence[Release]) -> str:
    """Returns the version as the index spells it, without a local part."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise NoSuchRelease(f"{package} {version!r} is not a version") from None
    found = [r.version for r in listed if Version(r.version).public == wanted.public]
    if not found:
        known = index.nearest(version, [r.version for r in listed])
        raise NoSuchRelease(
            f"there is no {package} {version}; the nearest releases are {', '.join(known)}",
            "Give a released version.",
        )
    return Version(found[0]).public


def searched(
    package: str,
    listed: Sequence[Release],
    bad: str,
    good: str | None,
    oldest: str = "",
    pre: bool = False,
    yanked: bool = False,
) -> list[Release]:
    """Returns the releases to search, oldest first, each version once."""
    unique: dict[str, Release] = {}
    for release in listed:
        public = Version(release.version).public
        if public not in unique or unique[public].uploaded is None:
            unique[public] = dataclasses.replace(release, version=public)
    ends = {bad, good} - {None}
    found = [
        r
        for r in unique.values()
        if r.version in ends or ((pre or not r.prerelease) and (yanked or not r.yanked))
    ]
    if oldest:
        floor = Version(spelled(package, oldest, listed))
    else:
        floor = _floor(found, bad)
    lowest = min(floor, *(Version(str(v)) for v in ends))
    return sorted(
        (r for r in found if Version(r.version) >= lowest), key=lambda r: Version(r.version)
    )


def _floor(found: Sequence[Release], bad: str) -> Version:
    """Returns the oldest release within :data:`REACH` before the bad end, or the oldest of all
    without upload dates.

    Much older releases rarely run with today's torch, and each would need an environment."""
    uploaded = next(r.uploaded for r in found if r.version == bad)
    if uploaded is None:
        return min(Version(r.version) for r in found)
    return min(
        Version(r.version)
        for r in found
        if r.uploaded is not None and r.uploaded >= uploaded - REACH
    )
