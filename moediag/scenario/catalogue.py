"""Finds scenarios: shipped ones by name, a user's own by path."""

from __future__ import annotations

import difflib
import importlib.resources
import re
from pathlib import Path

from moediag.errors import ScenarioError

_SUFFIXES = (".yaml", ".yml")
_TITLE = re.compile(r'^title: "?(.+?)"?$', re.MULTILINE)  # as in every shipped file


def folder() -> Path:
    """Returns the folder of the shipped scenarios: inside the package if installed from a wheel,
    beside it in a checkout. moediag never runs from a zip file, so it is a real folder."""
    package = Path(str(importlib.resources.files("moediag")))
    installed = package / "scenarios"
    return installed if installed.is_dir() else package.parent / "scenarios"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def titles() -> dict[str, str]:
    """Returns the title of each shipped scenario. Parsing the whole files takes over a second."""
    found = ((n, _TITLE.search((folder() / f"{n}.yaml").read_text("utf-8"))) for n in names())
    return {name: title[1] if title is not None else "" for name, title in found}


def find(name_or_path: str) -> Path:
    """Returns the file of a shipped scenario, or of the user's own. A word with a suffix or a slash
    is a path. Raises ScenarioError with the nearest names."""
    if name_or_path in names():
        return folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    looks_like_path = path.suffix in _SUFFIXES or "/" in name_or_path or "\\" in name_or_path
    if not looks_like_path and not path.is_file():
        near = difflib.get_close_matches(name_or_path, names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScenarioError(
            f"no scenario is called {name_or_path!r}{hint}",
            "`moediag list` lists them. Name your own file by its path.",
        )
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name too long, a zero byte
        exists = False
    if not exists:
        raise ScenarioError(
            f"{name_or_path}: no such file", "`moediag list` lists the shipped scenarios."
        )
    return path
