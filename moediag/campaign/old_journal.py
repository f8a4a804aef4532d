"""A file that only grows: one JSON object a line, so that what was found out survives any end.

Every line is one ``write`` to a file opened for appending, flushed to the disk, so a kill at any
moment costs at most the line that was being written; a line without its end is dropped when the
file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from moediag.errors import EvidenceError, UsageError


def append(fd: int, path: Path, record: Mapping[str, Any]) -> None:
    """One line, whole or not at all as far as this process can see to it. Raises EvidenceError
    when the disk refuses."""
    data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    size = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written < len(data):
            raise OSError(None, f"{written} of {len(data)} bytes written")
        os.fsync(fd)
    except OSError as error:
        os.ftruncate(fd, size)  # a torn line in the middle would spoil all that follow
        raise EvidenceError(
            f"{path}: cannot be written: {error.strerror or error}",
            "Make room and type the same command with --resume; finished probes are kept.",
        ) from error


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(its lines, how many bytes of it are whole); a last line that is cut off is left out. Raises
    EvidenceError, naming the line, and OSError."""
    found: list[dict[str, Any]] = []
    data, start = path.read_bytes(), 0
    while start < len(data):
        end = data.find(b"\n", start)
        try:
            raw = json.loads(data[start:] if end < 0 else data[start:end])
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            if end < 0:
                break  # the line that was being written when everything ended
            raise EvidenceError(
                f"{path}:{len(found) + 1}: not a JSON object",
                "Remove that line (what it said is found out again), or use another folder.",
            )
        found.append(raw)
        start = len(data) if end < 0 else end + 1
    return found, start


def cut(path: Path, whole: int) -> None:
    """Cuts the file to its ``whole`` first bytes, and ends the last line if that is missing."""
    with path.open("r+b") as file:
        file.truncate(whole)
        if whole == 0:
            return
        file.seek(whole - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")


def locked(folder: Path, name: str) -> filelock.BaseFileLock:
    """The lock of the file ``name`` in ``folder``, held. Raises UsageError when another moediag
    has it."""
    lock = filelock.FileLock(folder / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UsageError(
            f"{folder / name}: another moediag is at work on it",
            "Wait for it, or give another folder with --out.",
        ) from None
    return lock
