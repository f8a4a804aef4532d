"""What a rank does while it computes nothing: it reads or writes files, or waits for its children.

Read from /proc alone, without stopping the process. One look says little, so two are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from moediag.launch.processes import Process, ProcStat, all_stats
from moediag.records import dataclass

LEAST_RATE = 100_000.0  # bytes a second: less may be a log of a rank that waits
LEAST_CPU = 0.2  # of one core: less may be a monitoring process
WAITS = "waits for the child process"
_STANDARD = 3  # stdin, stdout and stderr: what a rank prints is not its work
_ACCESS = 0o3  # of a descriptor's flags; 0: only reading


@dataclass(frozen=True, slots=True)
class Activity:
    """One look at a process."""

    at: float
    """When, in seconds of any clock."""
    offsets: Mapping[tuple[str, bool], int]
    """(Path of an open regular file, whether it is open for writing) -> offset in bytes."""
    storage: int
    """Bytes read from and written to storage so far."""
    children: float
    """CPU seconds of the process's descendants so far."""
    busiest: str = ""
    """The name of the descendant with most CPU time."""


def look(process: Process, now: float) -> Activity | None:
    """Returns what can be read of ``process``; None if it is gone."""
    if not process.alive:
        return None
    below = list(_descendants(process.pid, all_stats()))
    busiest = max(below, key=lambda stat: stat.cpu, default=None)
    return Activity(
        now,
        dict(_offsets(process.pid)),
        _storage(process.pid),
        sum(stat.cpu for stat in below),
        _name(busiest.pid) if busiest is not None else "",
    )


def work(before: Activity, after: Activity) -> str:
    """Returns what the process did between two looks: ``writes model.pt at 0.4 MB/s``, ``waits for
    the child process nvcc, which works``; "" if neither is seen."""
    seconds = after.at - before.at
    if seconds <= 0:
        return ""
    moved = {
        file: offset - before.offsets.get(file, offset) for file, offset in after.offsets.items()
    }
    (path, writes), most = max(moved.items(), key=lambda item: item[1], default=(("", False), 0))
    if most >= LEAST_RATE * seconds:
        verb = "writes" if writes else "reads"
        return f"{verb} {Path(path).name} at {most / seconds / 1e6:.1f} MB/s"
    stored = after.storage - before.storage
    if stored >= LEAST_RATE * seconds:
        return f"reads or writes files at {stored / seconds / 1e6:.1f} MB/s"
    if after.children - before.children >= LEAST_CPU * seconds:
        return f"{WAITS} {after.busiest}, which works"
    return ""


def _offsets(pid: int) -> Iterator[tuple[tuple[str, bool], int]]:
    """Yields the regular files that ``pid`` has open; none if that may not be read."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - called often, strings suffice
            with suppress(OSError, ValueError, KeyError):
                path = os.readlink(f"{folder}/{name}")  # noqa: PTH115
                if int(name) < _STANDARD or not path.startswith("/") or not Path(path).is_file():
                    continue
                text = Path(f"/proc/{pid}/fdinfo/{name}").read_text(encoding="ascii")
                facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
                writes = bool(int(facts["flags"], 8) & _ACCESS)
                yield (path, writes), int(facts["pos"])


def _storage(pid: int) -> int:
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        facts = dict(line.split(":", 1) for line in text.splitlines())
        return int(facts.get("read_bytes", 0)) + int(facts.get("write_bytes", 0))
    return 0


def _descendants(pid: int, stats: Mapping[int, ProcStat]) -> Iterator[ProcStat]:
    below = {pid}
    while below:
        found = [stat for stat in stats.values() if stat.ppid in below]
        yield from found
        below = {stat.pid for stat in found}


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return "?"
