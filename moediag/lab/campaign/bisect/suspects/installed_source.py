"""A package as installed in an environment: its files and its source repository."""

from __future__ import annotations

import re
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
    version: str
    root: Path  # the folder that these names are relative to
    files: dict[str, str]  # Python files, as imported -> digest of the content
    tops: tuple[str, ...]  # import names, the largest first
    compiled: bool  # whether it has extension modules
    repository: str = ""  # "" if its metadata has none

    def text(self, file: str) -> str | None:
        """Returns the text, or None for a file that is missing or unreadable."""
        try:
            return (self.root / file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


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
    files: dict[str, str] = {}
    compiled = False
    for path in found.files:
        compiled = compiled or path.suffix in {".so", ".pyd", ".dylib"}
        if path.suffix == ".py" and path.parts[0] != "..":
            digest = path.hash.value if path.hash else str(path.size)
            files[path.as_posix()] = digest
    tops: dict[str, int] = {}
    for file in files:
        top = file.split("/")[0].removesuffix(".py")
        tops[top] = tops.get(top, 0) + 1
    return Package(
        name=name,
        version=found.version,
        root=Path(str(found.locate_file(""))),
        files=files,
        tops=tuple(sorted(tops, key=lambda top: (-tops[top], top))),
        compiled=compiled,
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
    """Returns the page that compares the tags ``vOLD`` and ``vNEW``; "" without an address."""
    if not address:
        return ""
    between = "/-/compare/" if "//gitlab." in address else "/compare/"
    return f"{address}{between}v{old}...v{new}"
