"""Where scenarios, programs and fixes are: those of the catalogue, and a user's own by path."""

from __future__ import annotations

from pathlib import Path

PROGRAMS, FIXES = "programs", "fixes"  # folders beside the scenarios


def folder() -> Path:
    """Returns the folder of the shipped scenarios: inside the package if installed from a wheel,
    beside it in a checkout. moediag never runs from a zip file, so it is a real folder. The ranks
    import the package through a link."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "scenarios"
    return installed if installed.is_dir() else package.parent / "scenarios"


def is_own(name: str) -> bool:
    """Whether the program or fix ``name`` is a user's own, named by the path of its file."""
    return name.endswith(".py")


def file(kind: str, name: str) -> Path:
    """Returns the file of a program or fix. ``kind``: PROGRAMS or FIXES; ``name``: as a scenario
    names it, in kebab-case, or the absolute path of a user's own."""
    return Path(name) if is_own(name) else folder() / kind / f"{name.replace('-', '_')}.py"
