"""Copies the source files of the user's frames into ``capture/source.json``, while the job runs.

Later they may be changed or gone, and on another node the same path may hold another file. A file
that changed after the rank started is not what it runs, so it is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from moediag import protocol
from moediag.evidence import rank_stacks
from moediag.evidence.model import Frame
from moediag.launch.processes import Process

SOURCE_FILE = "source.json"
_MOST_FILES = 64
_LARGEST = 1 << 20  # bytes
_TICK = os.sysconf("SC_CLK_TCK")
_SLACK = 0.05  # seconds; an interpreter needs about as long until it reads its first file


def keep(folder: Path, capture: Path, ranks: Mapping[int, Process]) -> None:
    """Writes ``{"files": {path: text}, "lost": {path: reason}}`` for the frames of ``ranks``."""
    files: dict[str, str] = {}
    lost: dict[str, str] = {}
    for rank, process in ranks.items():
        for path in _user_files(folder, capture, rank):
            if path in files or path in lost or len(files) >= _MOST_FILES:
                continue
            try:
                files[path] = _read(path, process)
            except (OSError, ValueError) as error:
                lost[path] = str(error) if isinstance(error, ValueError) else error.strerror or "?"
    if files or lost:
        protocol.write_json(capture / SOURCE_FILE, {"files": files, "lost": lost})


def _user_files(folder: Path, capture: Path, rank: int) -> Iterator[str]:
    for frames in _stacks(folder, capture, rank):
        names = [frame.file for frame in frames]
        for path, library in zip(names, protocol.in_libraries(names), strict=True):
            if not library and not path.startswith("<"):
                yield path


def _stacks(folder: Path, capture: Path, rank: int) -> Iterator[list[Frame]]:
    spied, written = capture / f"rank-{rank}.pyspy.json", folder / protocol.stacks_file(rank)
    for path, parse in (
        (spied, rank_stacks.parse_pyspy),
        (written, rank_stacks.parse_faulthandler),
    ):
        if path.is_file():
            for stack in parse(path.read_text(encoding="utf-8", errors="replace")):
                yield [frame for frame in stack.frames if not frame.native]


def _read(path: str, process: Process) -> str:
    """The text of ``path`` as the process sees it. Raises ValueError if it cannot be what runs."""
    if not path.startswith("/"):
        path = f"{os.readlink(f'/proc/{process.pid}/cwd')}/{path}"  # noqa: PTH115
    seen = Path(f"/proc/{process.pid}/root{path}")  # the job may run in a container
    status = seen.stat()
    if status.st_size > _LARGEST:
        raise ValueError("larger than 1 MiB")
    # A change of the content or a file moved here both set the time of the last status change.
    if status.st_ctime > _started(process) + _SLACK:
        raise ValueError("changed after the job started")
    return seen.read_text(encoding="utf-8", errors="replace")


def _started(process: Process) -> float:
    """Epoch seconds."""
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - uptime + process.started / _TICK
