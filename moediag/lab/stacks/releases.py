"""Lists the releases of a package and their upload times.

It queries the configured indexes (:mod:`moediag.lab.stacks.indexes`) through the simple API, as
JSON (PEP 691, upload times by PEP 700) or HTML, and reads ``find-links`` folders. Any upload time
may be missing; none is guessed.
"""

from __future__ import annotations

import bisect
import functools
import sys
from datetime import datetime

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from moediag.errors import NoEnvironments, NoSuchRelease
from moediag.lab.stacks.index_pages import IndexFile, Unreachable, read_index, read_links
from moediag.lab.stacks.indexes import IndexConfig, read_config
from moediag.records import dataclass

NO_NETWORK_HELP = (
    "Check the network, proxy (HTTPS_PROXY) and index (PIP_INDEX_URL or pip.conf); "
    "`moediag doctor` tries them.\n"
    "For a machine without a network: on one that has it, type, with the releases you need,\n"
    f"  moediag stacks build --python-version {sys.version_info[0]}.{sys.version_info[1]} "
    "--out wheels transformers=4.53.2\n"
    "copy the folder over and set MOEDIAG_WHEELS to it."
)


@dataclass(frozen=True, slots=True)
class Release:
    """One release of a package."""

    version: str
    uploaded: datetime | None = None  # upload time of its first file in UTC, if known
    yanked: bool = False  # every file is yanked; it can still be installed by exact version
    prerelease: bool = False
    requires_python: str | None = None
    yanked_reason: str = ""
    settled: datetime | None = None  # upload time of the last file of the first day


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a package, and the places that could not be queried."""

    files: tuple[IndexFile, ...]
    unreachable: tuple[str, ...] = ()


def releases(package: str, config: IndexConfig | None = None) -> list[Release]:
    """Returns all releases, oldest version first.

    Raises StackError without a network and NoSuchRelease if no index has the package.
    """
    listing = files(package, config)
    by_version: dict[str, list[IndexFile]] = {}
    for file in listing.files:
        by_version.setdefault(file.version, []).append(file)
    found = [_release(version, group) for version, group in by_version.items()]
    return sorted(found, key=lambda r: Version(r.version))


def files(package: str, config: IndexConfig | None = None) -> Listing:
    """Returns every file of ``package`` on every configured index; cached per process."""
    return _files(canonicalize_name(package), config or read_config())


def find(package: str, version: str, config: IndexConfig | None = None) -> Release:
    """Returns the release ``version``; the local part (``2.13.0+cpu``) may be omitted.

    Raises NoSuchRelease, which names the nearest releases.
    """
    config = config or read_config()
    known = releases(package, config)
    wanted = Version(version)
    exact = [r for r in known if Version(r.version) == wanted]
    if not exact and wanted.local is None:
        exact = [r for r in known if Version(r.version).public == wanted.public]
    if exact:
        return exact[-1]
    unreachable = files(package, config).unreachable
    if unreachable:
        raise NoEnvironments(
            f"{package} {version} was not found, and not every index could be asked: "
            + "; ".join(unreachable),
            NO_NETWORK_HELP,
        )
    raise NoSuchRelease(
        f"there is no {package} {version}; the nearest releases are "
        + ", ".join(nearest(version, [r.version for r in known]))
    )


def newest(package: str, python_version: str, config: IndexConfig | None = None) -> Release:
    """Returns the newest final, unyanked release that runs on ``python_version``."""
    for release in reversed(releases(package, config)):
        if not release.yanked and not release.prerelease and supports(release, python_version):
            return release
    raise NoSuchRelease(f"no release of {package} runs on Python {python_version}")


def supports(release: Release, python_version: str) -> bool:
    """Returns False only if the release's metadata excludes this Python."""
    if not release.requires_python:
        return True
    try:
        return SpecifierSet(release.requires_python).contains(python_version, prereleases=True)
    except InvalidSpecifier:
        return True


def nearest(version: str, known: list[str], count: int = 4) -> list[str]:
    """Returns the ``count`` known versions around ``version``, in order."""
    ordered = sorted(known, key=Version)
    place = bisect.bisect_left([Version(v) for v in ordered], Version(version))
    start = max(0, min(place - count // 2, len(ordered) - count))
    return ordered[start : start + count]


@functools.lru_cache(maxsize=64)
def _files(package: str, config: IndexConfig) -> Listing:
    found: dict[str, IndexFile] = {}
    unreachable: list[str] = []
    asked: list[str] = []
    for place, read in [(u, read_index) for u in config.indexes] + [
        (place, read_links) for place in config.find_links
    ]:
        try:
            for file in read(place, package, config):
                # Of the same file on two indexes, keep the record with an upload time.
                if file.name not in found or found[file.name].uploaded is None:
                    found[file.name] = file
            asked.append(place)
        except Unreachable as error:
            unreachable.append(str(error))
    usable = tuple(f for f in found.values() if _is_version(f.version))
    if not usable and unreachable:
        # lru_cache does not cache exceptions, so the next call queries again.
        raise NoEnvironments(
            f"cannot ask for the releases of {package}: " + "; ".join(unreachable), NO_NETWORK_HELP
        )
    if not usable:
        where = ", ".join(asked) or "no index is configured"
        raise NoSuchRelease(
            f"no package named {package} ({where})",
            "Check the spelling; `pip config list` shows which indexes are asked.",
        )
    return Listing(usable, tuple(unreachable))


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _release(version: str, group: list[IndexFile]) -> Release:
    times = sorted(f.uploaded for f in group if f.uploaded is not None)
    settled = [t for t in times if (t - times[0]).days < 1]
    wheels_first = sorted(group, key=lambda f: not f.name.endswith(".whl"))
    return Release(
        version=version,
        uploaded=times[0] if times else None,
        yanked=all(f.yanked is not None for f in group),
        prerelease=Version(version).is_prerelease,
        requires_python=next((f.requires_python for f in wheels_first if f.requires_python), None),
        yanked_reason=next((f.yanked for f in group if f.yanked), ""),
        settled=settled[-1] if settled else None,
    )
