"""Lists and removes the environments built on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from moediag.errors import UsageError
from moediag.lab.stacks import construct
from moediag.lab.stacks.base import cache_root
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """One environment."""

    key: str
    path: Path
    kind: str
    versions: dict[str, str]
    size: int  # bytes on disk
    shared: int  # bytes hard-linked into uv's cache, which removal does not free
    last_used: datetime
    broken: bool  # files of it, or its torch, are gone: it would be rebuilt
    in_use: bool  # a process runs in it


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of removing one environment."""

    key: str
    freed: int  # bytes
    reason: str = ""  # why it was kept; empty if it was removed


def list_environments() -> list[EnvironmentInfo]:
    """Returns every environment, last used first, without half-built ones."""
    root = cache_root()
    used = _prefixes_in_use(root / "envs")
    found = [_info(root, path, path.name in used) for path in _environments(root)]
    return sorted(found, key=lambda info: info.last_used, reverse=True)


def clean(
    keys: Sequence[str] = (), older_than_days: float | None = None, everything: bool = False
) -> list[Removed]:
    """Removes environments by key, by age or all; never one in use.

    Also removes what interrupted builds left. Resolutions are kept, so that a request builds the
    same environment again, unless ``everything`` is set. Raises UsageError for an unknown key and
    if nothing is requested.
    """
    if not (keys or everything or older_than_days is not None):
        raise UsageError(
            "nothing to clean was named",
            "Type `moediag stacks clean --all`, `--older-than 30` (days), or a key of "
            "`moediag stacks list`.",
        )
    root = cache_root()
    present = list_environments()
    unknown = sorted(set(keys) - {info.key for info in present})
    if unknown:
        raise UsageError(
            f"no such environment: {', '.join(unknown)}",
            "`moediag stacks list` shows the keys.",
        )
    removed = []
    now = datetime.now(timezone.utc)
    for info in present:
        days = (now - info.last_used).total_seconds() / 86400
        old = older_than_days is not None and days > older_than_days
        if everything or old or info.key in keys:
            removed.append(_remove(root, info))
    _remove_remains(root)
    if everything:
        for record in (root / "requests").glob("*.json"):
            record.unlink(missing_ok=True)
    return removed


def _environments(root: Path) -> Iterator[Path]:
    try:
        entries = sorted((root / "envs").iterdir())
    except OSError:
        return
    for path in entries:
        if path.is_dir() and not path.name.startswith("."):
            yield path


def _info(root: Path, path: Path, in_use: bool) -> EnvironmentInfo:
    import json

    record = construct.intact(root, path.name)
    broken = record is None
    if record is None:
        try:
            record = json.loads((path / construct.RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = {}
    versions = dict(pin.split("==", 1) for pin in record.get("pins", ()))
    if record.get("torch"):
        versions["torch"] = record["torch"]
    if record.get("python"):
        versions["python"] = record["python"]
    stamp = path / construct.LAST_USED
    moment = (stamp if stamp.exists() else path).stat().st_mtime
    size, shared = _sizes(path)
    return EnvironmentInfo(
        key=path.name,
        path=path,
        kind=record.get("kind", "unknown"),
        versions=versions,
        size=size,
        shared=shared,
        last_used=datetime.fromtimestamp(moment, timezone.utc),
        broken=broken,
        in_use=in_use,
    )


def _sizes(folder: Path) -> tuple[int, int]:
    """Returns the bytes on disk, without following links, and the bytes of hard-linked files."""
    size = shared = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - thousands of files
            except OSError:
                continue
            size += status.st_blocks * 512
            if status.st_nlink > 1:
                shared += status.st_blocks * 512
    return size, shared


def _prefixes_in_use(envs: Path) -> set[str]:
    """Returns the names of environments whose interpreter runs a process."""
    import psutil  # type: ignore[import-untyped]

    used = set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        try:
            used.add(Path(command[0]).relative_to(envs).parts[0])
        except (ValueError, IndexError):
            continue
    return used


def _remove(root: Path, info: EnvironmentInfo) -> Removed:
    import filelock

    if info.in_use:
        return Removed(info.key, 0, "in use")
    lock = root / "locks" / f"{info.key}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(lock, timeout=0):
            construct.remove(info.path)
    except filelock.Timeout:
        return Removed(info.key, 0, "being built")
    if info.path.exists():
        return Removed(info.key, 0, "cannot be removed: permission denied")
    return Removed(info.key, info.size - info.shared)


def _remove_remains(root: Path) -> None:
    """Removes what interrupted builds and removals left, except folders of running builds."""
    import filelock

    for path in (root / "envs").glob(".removed-*"):
        construct.remove(path)
    for path in (root / "envs").glob(".building-*"):
        key = path.name.removeprefix(".building-")
        try:
            with filelock.FileLock(root / "locks" / f"{key}.lock", timeout=0):
                construct.remove(path)
        except filelock.Timeout:
            continue
