"""A package as installed in an environment: its files and its source repository."""

from __future__ import annotations

import re
from collections import Counter
from importlib import metadata
from pathlib import Path

from moediag.errors import StackError
from moediag.lab.stacks.overlay import FOLDER, site_packages
from moediag.records import dataclass

_REPOSITORY = re.compile(r"^(https?://(?:github|gitlab|codeberg)\.[a-z]+/[^/\s]+/[^/\s#?]+)")
# Labels of a project's links, the best first.
_LABELS = ("repository", "source", "source code", "code", "github", "homepage", "home-page")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package."""

    name: str
    files: frozenset[str]  # Python files, as imported
    tops: tuple[str, ...]  # import names, the largest first
    compiled: bool  # whether it has extension modules
    repository: str = ""  # "" if its metadata has none


def installed(python: Path, name: str) -> Package:
    """Returns ``name`` in the environment of the interpreter ``python``. Raises StackError."""
    environment = python.parent.parent
    folders = [site_packages(environment), environment / FOLDER]
    found = next(
        iter(metadata.Distribution.discover(name=name, path=[str(f) for f in folders])), None
    )
    if found is None:
        raise StackError(f"{environment.name} has no {name}")
    if found.files is None:
        raise StackError(f"{environment.name}: {name} has no list of its files")
    files = [p.as_posix() for p in found.files if p.suffix == ".py" and p.parts[0] != ".."]
    tops = Counter(file.split("/")[0].removesuffix(".py") for file in files)
    return Package(
        name=name,
        files=frozenset(files),
        tops=tuple(sorted(tops, key=lambda top: (-tops[top], top))),
        compiled=any(path.suffix in {".so", ".pyd", ".dylib"} for path in found.files),
        repository=repository(found.metadata),
    )


def repository(about: metadata.PackageMetadata) -> str:
    """Returns the address of the source, from ``Project-URL`` and ``Home-page``."""
    links: dict[str, str] = {}
    for entry in about.get_all("Project-URL") or []:
        label, _, url = str(entry).partition(",")
        links.setdefault(label.strip().lower(), url.strip())
    links.setdefault("home-page", str((about.get_all("Home-page") or [""])[0]))
    ordered = sorted(links, key=lambda x: _LABELS.index(x) if x in _LABELS else len(_LABELS))
    for label in ordered:
        match = _REPOSITORY.match(links[label])
        if match:
            return match[1].removesuffix(".git")
    return ""


def compare(address: str, old: str, new: str) -> str:
    """Returns the page of the repository that compares the tags ``vOLD`` and ``vNEW``."""
    between = "/-/compare/" if "//gitlab." in address else "/compare/"
    return f"{address}{between}v{old}...v{new}"
