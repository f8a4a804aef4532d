"""What a matrix has found out so far: a header line, then one line a finished cell.

Cells are named by scenario, family, version and mode, so a later command may ask for more of them
in the same folder. What would make them mean something else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock

from moediag.campaign import old_journal as journal
from moediag.campaign.matrix.cells import Cell, Key
from moediag.errors import EvidenceError, UsageError

STATE_FILE = "matrix.jsonl"
SCHEMA_VERSION = 1
_TOLD = ("command", "moediag_version", "e", "schema_version")  # in the header, but no question


class State:
    """The open file; a context manager. Use :func:`opened`. ``cells`` holds all that is in it."""

    def __init__(
        self, path: Path, cells: dict[Key, Cell], lock: filelock.BaseFileLock, command: list[str]
    ) -> None:
        self.path = path
        self.cells = cells
        self.command = command
        self._lock = lock
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __enter__(self) -> State:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        self._lock.release()

    def finished(self, cell: Cell) -> None:
        """Records a cell. Raises ValueError when it is there already, EvidenceError when the disk
        refuses."""
        if cell.key in self.cells:
            raise ValueError(f"{cell.subject} on {cell.version} was done before ({cell.mode})")
        journal.append(self._fd, self.path, {"e": "cell", **cell.to_json()})
        self.cells[cell.key] = cell


def opened(
    folder: Path, header: Mapping[str, Any], digests: Mapping[str, str], resume: bool
) -> State:
    """``digests``: of each subject, as it would run now. Raises UsageError for a matrix that is
    there already (or not, with ``resume``), belongs to another question, or is at work;
    EvidenceError for a file that cannot be read."""
    path = folder / STATE_FILE
    if resume and not path.is_file():
        raise UsageError(f"--resume: there is no {path}", "Leave --resume away to start it.")
    if path.exists() and not resume:
        raise UsageError(
            f"{path}: a matrix was begun here",
            "Add --resume to go on with it, or give another folder with --out.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    lock = journal.locked(folder, STATE_FILE)
    try:
        cells = _read(path, header, digests) if path.exists() else {}
        if not path.exists() or path.stat().st_size == 0:
            _begin(path, header)
        return State(path, cells, lock, list(header["command"]))
    except BaseException:
        lock.release()
        raise


def read(folder: Path) -> tuple[dict[str, Any], dict[Key, Cell]]:
    """(header, cells) of a state file. Raises EvidenceError."""
    header, cells, _ = _parsed(folder / STATE_FILE)
    return header, cells


def _begin(path: Path, header: Mapping[str, Any]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        line = {"e": "header", "schema_version": SCHEMA_VERSION, **header}
        journal.append(fd, path, line)
    finally:
        os.close(fd)


def _read(path: Path, wanted: Mapping[str, Any], digests: Mapping[str, str]) -> dict[Key, Cell]:
    header, cells, whole = _parsed(path)
    found = list(_differences(header, wanted, cells, digests)) if header else []
    if found:
        raise UsageError(
            f"--resume: {path} belongs to another question: " + "; ".join(found),
            "Leave --resume away and give another folder with --out.",
        )
    journal.cut(path, whole)
    return cells


def _parsed(path: Path) -> tuple[dict[str, Any], dict[Key, Cell], int]:
    """(header, cells, whole bytes); no header where it ended before its first line."""
    try:
        lines, whole = journal.read(path)
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error
    if not lines:
        return {}, {}, 0
    header = lines[0]
    if header.get("e") != "header" or header.get("schema_version") != SCHEMA_VERSION:
        raise EvidenceError(f"{path}:1: no header of a matrix that this moediag reads")
    cells: dict[Key, Cell] = {}
    for number, raw in enumerate(lines[1:], 2):
        if raw.get("e") != "cell":
            continue  # of a later moediag
        try:
            cell = Cell.from_json(raw)
            if cell.key in cells:
                raise ValueError(f"{cell.subject} on {cell.version} is there twice ({cell.mode})")
        except (ValueError, KeyError) as error:
            why = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise EvidenceError(
                f"{path}:{number}: {why}", "Remove that line; its cell is made again."
            ) from error
        cells[cell.key] = cell
    return header, cells, whole


def _differences(
    there: Mapping[str, Any],
    wanted: Mapping[str, Any],
    cells: Mapping[Key, Cell],
    digests: Mapping[str, str],
) -> Iterator[str]:
    for name in sorted({*there, *wanted} - set(_TOLD)):
        old, new = there.get(name), wanted.get(name)
        if old != new:
            yield f"its {name} is {_word(old)}, not {_word(new)}"
    had = {cell.subject: cell.digest for cell in cells.values()}
    for subject in sorted(had.keys() & digests.keys()):
        if had[subject] != digests[subject]:
            yield f"{subject} was another then (its file, --set, --variant or --package)"


def _word(value: Any) -> str:
    return "not given" if value in (None, {}, "") else str(value)
