"""The file of a journal: appends whole lines and cuts off an incomplete last line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moediag.errors import DiskFull, EvidenceError, UsageError, disk_trouble
from moediag.protocol import parse_json, read_stored


def locked(path: Path, flags: int = 0) -> int:
    """Opens and locks ``path`` for appending. Raises UsageError if another moediag has it open."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(
            f"{path}: in use by another moediag",
            "Wait for it, or give another folder with --out.",
        ) from None
    except OSError:  # a file system without locks
        pass
    return fd


def append(fd: int, path: Path, line: Mapping[str, Any], then: str) -> None:
    """Adds one line, whole or not at all. ``then``: what to do once there is space. Raises
    DiskFull, or EvidenceError for another problem."""
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    size = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written")
        os.fsync(fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)  # an incomplete line would corrupt the following lines
        kind = DiskFull if disk_trouble(error) else EvidenceError
        raise kind(
            f"{path}: cannot be written: {error.strerror or error}",
            f"Make room: what is finished is kept.\n{then}",
        ) from error


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns (complete lines, their bytes). Raises EvidenceError, with the line, and OSError."""
    found: list[dict[str, Any]] = []
    data, start = read_stored(path), 0
    while start < len(data):
        end = data.find(b"\n", start)
        try:
            raw = parse_json(data[start:] if end < 0 else data[start:end])
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            if end < 0:
                break  # the line being written when the process ended
            raise EvidenceError(
                f"{path}:{len(found) + 1}: not a JSON object",
                "Remove that line (what it recorded is done again), or use another folder.",
            )
        found.append(raw)
        start = len(data) if end < 0 else end + 1
    return found, start


def cut(fd: int, path: Path, whole: int) -> None:
    """Truncates the file to ``whole`` bytes, and adds a missing line end."""
    os.ftruncate(fd, whole)
    with path.open("rb") as file:
        file.seek(whole - 1)
        ended = file.read(1) == b"\n"
    if not ended:
        os.write(fd, b"\n")
