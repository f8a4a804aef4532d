"""Edits of the copy of a program that is made for one run: adaptations to CPU, and faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class AnchorError(ValueError):
    """The program is not the one that the table was written for."""


@dataclass(frozen=True)
class Line:
    """A line of the program as it runs: the ``nth`` line of ``file`` that contains ``has``."""

    file: str
    has: str
    nth: int = 0

    def number(self, folder: Path) -> int:
        """Returns the line's number in ``folder``, from 1."""
        lines = (folder / self.file).read_text(encoding="utf-8").splitlines()
        found = [number for number, text in enumerate(lines, 1) if self.has in text]
        if len(found) <= self.nth:
            raise AnchorError(f"{folder / self.file}: {len(found)} lines contain {self.has!r}")
        return found[self.nth]

    def place(self, folder: Path) -> str:
        """Returns ``file.py:42``."""
        return f"{Path(self.file).name}:{self.number(folder)}"


@dataclass(frozen=True)
class Edit:
    """Replaces the line ``at`` by ``new``, indented as the line was. ``{line}`` in ``new`` stands
    for the line itself."""

    at: Line
    new: str

    def apply(self, folder: Path) -> None:
        path = folder / self.at.file
        lines = path.read_text(encoding="utf-8").splitlines()
        index = self.at.number(folder) - 1
        old = lines[index]
        indent = old[: len(old) - len(old.lstrip())]
        new = self.new.replace("{line}", old.strip()).splitlines()
        lines[index : index + 1] = [indent + text if text else "" for text in new]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def apply(edits: Iterable[Edit], folder: Path) -> None:
    for edit in edits:
        edit.apply(folder)
