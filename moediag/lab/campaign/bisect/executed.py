"""The files of installed packages of which a trial ran a function, as its ranks recorded them."""

from __future__ import annotations

from pathlib import Path

from moediag.protocol import read_stored

FILES = "rank-*.executed.txt"  # see executed_file


def read_executed(folder: Path) -> frozenset[str]:
    """Returns the files, as imported, of all ranks of the trials below ``folder``; empty if no rank
    recorded them. The incomplete last line of a killed rank is left out."""
    found: set[str] = set()
    for path in folder.rglob(FILES):
        found.update(read_stored(path).decode("utf-8", "replace").split("\n")[:-1])
    return frozenset(found)
