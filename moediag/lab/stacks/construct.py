"""Builds an environment in a temporary folder, renames it when complete, and checks it before use.

It compiles no bytecode: the first import writes what it uses, which is cheaper than compiling
everything (docs/reference/stacks.md has the numbers).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moediag.errors import NoSuchRelease, StackError, says_disk_full
from moediag.lab.stacks.base import NEWEST, Base, Part
from moediag.protocol import write_json

if TYPE_CHECKING:
    from moediag.lab.stacks.indexes import IndexConfig
    from moediag.lab.stacks.resolve import Progress, Resolution

FORMAT = 1  # increase it to stop using environments of older moediag versions
RECORD = "stack.json"
LAST_USED = "last-used"

_VERSION = re.compile(r"v?[0-9]+(\.[0-9]+)*([._-]?[a-z]+[._-]?[0-9]*)*(\+[a-z0-9.]+)?", re.I)


def normalise(request: Mapping[str, str]) -> dict[str, str]:
    """Returns the request in normal form: sorted canonical names, NEWEST for an open version.

    Adds the newest transformers unless the request names a library. Raises NoSuchRelease for a
    malformed version.
    """
    wanted: dict[str, str] = {}
    for name, value in request.items():
        text = str(value).strip().removeprefix("==").strip()
        if text.lower() in {"", "newest", "latest"}:
            text = NEWEST
        elif not _VERSION.fullmatch(text):
            raise NoSuchRelease(f"{name}={value}: {text!r} is not a version")
        wanted[re.sub(r"[-_.]+", "-", name.strip()).lower()] = text.lower().removeprefix("v")
    if not set(wanted) - {"torch", "python"}:
        wanted["transformers"] = NEWEST
    return dict(sorted(wanted.items()))


def environment_key(resolution: Resolution, wanted: Mapping[str, str], base: Base) -> str:
    """Returns a short name of the exact resolution; it starts with the main package."""
    ground = base.identity if resolution.kind == "overlay" else f"{base.real} {base.python}"
    text = json.dumps([FORMAT, resolution.kind, resolution.pins, resolution.python, ground])
    installed = resolution.installed
    leading = next((n for n in ("transformers", *wanted) if n in installed), "stack")
    version = installed.get(leading, "0").replace("+", "-")
    return f"{leading}-{version}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def intact(root: Path, key: str) -> dict[str, Any] | None:
    """Returns the record of environment ``key``; None if it is missing or half removed, or if its
    Python or torch is gone."""
    folder = root / "envs" / key
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        needed = [folder / path for path in record["needed"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if record.get("format") != FORMAT or not all(path.exists() for path in needed):
        return None
    return dict(record)


def stamp(root: Path, key: str) -> None:
    """Updates the time of last use of environment ``key``."""
    with contextlib.suppress(OSError):  # a read-only cache still works
        (root / "envs" / key / LAST_USED).touch()


def make(
    root: Path,
    key: str,
    resolution: Resolution,
    base: Base,
    parts: Sequence[Part],
    config: IndexConfig,
    progress: Progress,
) -> dict[str, Any]:
    """Builds environment ``key`` and returns its record; the caller holds its lock.

    Raises StackError and then leaves nothing behind.
    """
    from moediag.lab.stacks import uv

    envs = root / "envs"
    final, building = envs / key, envs / f".building-{key}"
    try:
        envs.mkdir(parents=True, exist_ok=True)
        remove(building)  # left by a killed moediag: the lock shows that no build is running
        remove(final)  # broken, else it would not be rebuilt
        record = _fill(building, key, resolution, base, parts, config, progress)
        building.rename(final)
    except OSError as error:
        if says_disk_full(error):
            raise uv.disk_full(root) from error
        raise StackError(f"cannot build the environment {final}: {error}") from error
    finally:
        remove(building)
    return record


def remove(folder: Path) -> None:
    """Removes an environment; renames it first, so that a partial one never has its name."""
    if not folder.exists():
        return
    grave = folder.with_name(f".removed-{os.getpid()}-{folder.name.lstrip('.')}")
    with contextlib.suppress(OSError):
        folder.rename(grave)
        folder = grave
    shutil.rmtree(folder, ignore_errors=True)


def _fill(
    folder: Path,
    key: str,
    resolution: Resolution,
    base: Base,
    parts: Sequence[Part],
    config: IndexConfig,
    progress: Progress,
) -> dict[str, Any]:
    from moediag.lab.stacks import overlay, uv

    full = resolution.kind == "full"
    size = " with a torch of its own (CUDA: several GB)" if full else ""
    progress(f"building {key}{size}", 0.15)
    python = resolution.python or str(base.executable)
    uv.run(
        ["venv", "--relocatable", "--no-project", "--quiet", "--python", python, str(folder)],
        config, folder.parent, what=f"making an environment with Python {python}",
    )  # fmt: skip
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(resolution.pins) + "\n", encoding="utf-8")
    uv.run(
        ["pip", "install", "--python", str(folder / "bin" / "python"), "--no-deps",
         "--no-progress", "-r", str(requirements), *config.uv_arguments()],
        config, folder, _Downloads(key + size, progress), what=f"installing {key}",
    )  # fmt: skip
    progress(f"finishing {key}", 0.95)
    site = overlay.site_packages(folder)
    infos = _metadata_folders(site, set(resolution.installed))
    needed = ["bin/python", *(os.path.relpath(p, folder) for p in infos)]
    linked: list[str] = []
    if not full:
        linked = overlay.link_torch(folder, parts, set(resolution.installed))
        # These links break when the base's torch is upgraded, moved or removed.
        links = sorted((folder / overlay.FOLDER).iterdir())
        needed += [f"{overlay.FOLDER}/{link.name}" for link in links]
    record = {
        "format": FORMAT,
        "key": key,
        "kind": resolution.kind,
        "pins": list(resolution.pins),
        "linked": linked,
        "torch": None if full else base.torch,
        "python": _python_version(folder),
        "needed": needed,
        "frozen_torch": not full and _frozen(folder / overlay.FOLDER / "torch"),
    }
    (folder / LAST_USED).touch()
    write_json(folder / RECORD, record)
    return record


class _Downloads:
    """Turns uv's messages into a fraction between 0.2 and 0.9."""

    def __init__(self, what: str, progress: Progress) -> None:
        self.what, self.progress = what, progress
        self.announced = self.done = 0

    def __call__(self, line: str) -> None:
        word = line.split(" ", 1)[0].lower()
        if word in {"downloading", "building"}:
            self.announced += 1
        elif word in {"downloaded", "built"}:
            self.done += 1
        elif word not in {"prepared", "installed", "resolved"}:
            return  # a warning, or one of the "+ name==version" lines
        part = self.done / self.announced if self.announced else 0.5
        fraction = 0.9 if word == "installed" else 0.2 + 0.6 * part
        self.progress(f"building {self.what}: {line}", fraction)


def _metadata_folders(site: Path, names: set[str]) -> list[Path]:
    """Returns the .dist-info folder of every name. Raises StackError if one is missing."""
    found = {}
    for path in site.glob("*.dist-info"):
        found[re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower()] = path
    missing = sorted(names - set(found))
    if missing:
        raise StackError(f"uv reported success, but {', '.join(missing)} is not installed")
    return sorted(found[name] for name in names)


def _python_version(folder: Path) -> str:
    for line in (folder / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.strip() in {"version_info", "version"}:
            return value.strip()
    raise StackError(f"{folder}/pyvenv.cfg names no version")


def _frozen(torch: Path) -> bool:
    """Whether torch has no bytecode and its folder is read-only."""
    import importlib.util

    compiled = importlib.util.cache_from_source(str(torch / "__init__.py"))
    return not Path(compiled).exists() and not os.access(torch, os.W_OK)
