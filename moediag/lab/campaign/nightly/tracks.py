"""Tracks: which package runs on another release than the scenarios pin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from packaging.utils import canonicalize_name
from packaging.version import Version

from moediag.errors import MoediagError, UsageError
from moediag.lab.stacks import releases as index
from moediag.records import dataclass

PINNED, NEWEST, PRE = "pinned", "newest", "pre"
PACKAGES = ("transformers", "accelerate", "torch")
DEFAULT = (PINNED, NEWEST, PRE)
_HELP = "One of pinned, newest, pre, or PACKAGE=newest, PACKAGE=pre."


@dataclass(frozen=True, slots=True)
class Track:
    """A package to move. ``package``: "" for the pinned stacks; only one package moves at a time,
    so that it identifies a breakage. ``version``: the release to use, "" for none."""

    package: str = ""
    kind: str = PINNED
    version: str = ""

    @property
    def name(self) -> str:
        return f"{self.package}={self.kind}" if self.package else PINNED

    @property
    def order(self) -> int:
        return DEFAULT.index(self.kind)


def parse(texts: Sequence[str]) -> list[Track]:
    """Parses ``["pinned", "torch=pre"]``; an empty list means all. Raises UsageError."""
    found: dict[str, Track] = {}
    for text in texts or DEFAULT:
        package, equals, kind = text.partition("=")
        if not equals:
            package, kind = "", text
        if kind not in DEFAULT or (equals and (kind == PINNED or not package)):
            raise UsageError(f"--track {text}: no such track", _HELP)
        if kind == PINNED:
            packages: Sequence[str] = ("",)
        else:
            packages = (str(canonicalize_name(package)),) if package else PACKAGES
        for name in packages:
            track = Track(name, kind)
            found.setdefault(track.name, track)
    return sorted(found.values(), key=lambda t: t.order)


def resolved(tracks: Sequence[Track], python: str, note: Callable[[str], None]) -> Iterator[Track]:
    """Yields the tracks with versions. One with no newer release is skipped; ``note`` gets the
    reason."""
    for track in tracks:
        if not track.package:
            yield track
            continue
        try:
            version = _version(track, python)
        except MoediagError as error:
            note(f"{track.name}: {error.message}")
            continue
        if version is None:
            note(f"{track.name}: no pre-release is newer than the newest release")
        else:
            yield Track(track.package, track.kind, version)


def _version(track: Track, python: str) -> str | None:
    newest = index.newest(track.package, python).version
    if track.kind == NEWEST:
        return Version(newest).public
    later = [
        r.version
        for r in index.releases(track.package)
        if r.prerelease and not r.yanked and index.supports(r, python)
        and Version(r.version) > Version(newest)
    ]  # fmt: skip
    return Version(later[-1]).public if later else None
