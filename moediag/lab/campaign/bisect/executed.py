"""The functions of installed packages that a trial ran, as its ranks recorded them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.protocol import parse_json, read_stored
from moediag.records import dataclass

_FILE = re.compile(r"^rank-\d+\.executed\.jsonl$")


@dataclass(frozen=True, slots=True)
class Executed:
    """What ran, of all ranks together."""

    #: File as imported -> first lines of the functions that ran, 0 for the file itself.
    functions: dict[str, set[int]] = field(default_factory=dict)
    #: (file, class) -> its places in the model, e.g. ``model.layers.*.mlp``.
    classes: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.functions)


def read_executed(folder: Path) -> Executed:
    """What all ranks of the trial in ``folder`` ran; empty if none recorded it.

    Truncated lines are left out.
    """
    found = Executed()
    try:
        paths = sorted(p for p in folder.iterdir() if _FILE.match(p.name))
    except OSError:
        return found
    for path in paths:
        names: dict[Any, str] = {}
        for file, what, *more in _lines(path):
            if isinstance(what, int) and file in names:
                found.functions.setdefault(names[file], set()).add(what)
            elif more and file in names:
                found.classes.setdefault((names[file], str(what)), set()).add(str(more[0]))
            elif isinstance(what, str) and not more:
                names[file] = what
    return found


def _lines(path: Path) -> Iterator[list[Any]]:
    for line in read_stored(path).decode("utf-8", "replace").splitlines():
        try:
            values = parse_json(line)
        except ValueError:
            continue
        if isinstance(values, list) and len(values) >= 2 and isinstance(values[0], int):
            yield values
