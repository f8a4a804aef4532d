"""What a rank does while it computes nothing: it and its child processes read or write files, or
use the network, or its children compute; or that it waits for a lock that nothing will release.

Read from /proc alone, without stopping the process. One look says little, so two are compared.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from moediag.launch.capture import network
from moediag.launch.processes import Process, ProcStat, all_stats
from moediag.records import dataclass

LEAST_RATE = 100_000.0  # bytes a second: less may be a log of a rank that waits
_LEAST_CPU = 0.2  # of one core: less may be a monitoring process
_LEAST_OF_CHILD = 0.02  # of a child process that is waited for
NETWORK = "over the network at"
WAITS = "waits for the child process"
STUCK = "waits for a lock"
# Its system call, and the one that shows in its place, with its arguments, once a thread that set a
# time limit was stopped for its stack: restart_syscall, which sleeps and polls also become.
_FUTEX, _AGAIN = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}.get(
    platform.machine(), ("", "")
)
_WAIT = ("0x80", "0x89", "0x189")  # the second argument of a wait within a process
_FOR_EVER = "0x0"  # the fourth: no time limit
_WOKEN = 8  # times between two looks: reading a stack wakes a thread that sleeps
_STANDARD = 3  # stdin, stdout and stderr: what a rank prints is not its work
_ACCESS = 0o3  # of a descriptor's flags; 0: only reading


@dataclass(frozen=True, slots=True)
class Activity:
    """One look at a process and its descendants."""

    at: float
    """When, in seconds of any clock."""
    offsets: Mapping[tuple[str, bool], int]
    """(Path of an open regular file, whether it is open for writing) -> offset in bytes."""
    storage: int = 0
    """Bytes read from and written to storage so far."""
    calls: int = 0
    """Bytes that system calls read and wrote so far: of any file, pipe or terminal."""
    children: float = 0.0
    """CPU seconds of the process's descendants so far."""
    busiest: str = ""
    """The name of the descendant with most CPU time."""
    wants_cpu: bool = False
    """A descendant runs, or waits for a CPU or a disk."""
    connections: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By connection: bytes sent and received so far."""
    turns: int = 0
    """Batches and forwards of the rank so far, as its heartbeat counts them."""
    lock: str = ""
    """The system call in which its main thread waits for a lock, if it set no time limit and all
    threads of Python wait for locks; "" otherwise, or if that is not known."""
    woken: int = 0
    """How often its main thread has run so far."""


def look(
    process: Process,
    now: float,
    moved: network.Bytes | None = None,
    threads: Collection[int] = (),
) -> Activity | None:
    """Returns what can be read of ``process``; None if it is gone. ``moved``: it is in
    communication, so only what its own connections carried counts. ``threads``: those of Python, if
    they are known."""
    itself = process.stat()
    if itself is None or not itself.alive:
        return None
    if moved is not None:
        return Activity(now, {}, connections=network.connections([process.pid], moved))
    below = list(_descendants(process.pid, all_stats()))
    busiest = max(below, key=lambda stat: stat.cpu, default=None)
    pids = [process.pid, *(stat.pid for stat in below)]
    storage, calls = map(sum, zip(*map(_transferred, pids), strict=True))
    return Activity(
        now,
        dict(sorted(found for pid in pids for found in _offsets(pid))),
        storage,
        calls,
        itself.reaped + sum(stat.cpu + stat.reaped for stat in below),
        _name(busiest.pid) if busiest is not None else "",
        any(stat.state in "RD" for stat in below),
        network.connections(pids, network.bytes_by_socket()),
        0,
        *_lock(process.pid, threads),
    )


def work(before: Activity, after: Activity, waited_for: bool = False) -> str:
    """Returns what the process did between two looks: ``writes model.pt at 0.4 MB/s``, ``waits for
    the child process nvcc, which works``; STUCK if only another process could end its wait, and its
    children do nothing; "" otherwise: it may be slow. ``waited_for``: its stack shows that it waits
    for a child."""
    seconds = after.at - before.at
    if seconds <= 0:
        return ""
    if after.turns > before.turns:
        rate = (after.turns - before.turns) / seconds
        return f"takes batches or runs its model, {rate:.1f} times a second"
    moved = {
        file: offset - before.offsets.get(file, offset) for file, offset in after.offsets.items()
    }
    (path, writes), most = max(moved.items(), key=lambda item: item[1], default=(("", False), 0))
    sent, received = _carried(before, after)
    read = max(after.storage - before.storage, after.calls - before.calls)
    for words, number in (
        (f"{'writes' if writes else 'reads'} {Path(path).name} at", most),
        (f"{'sends' if sent > received else 'receives'} {NETWORK}", max(sent, received)),
        ("reads or writes at", read),
    ):  # fmt: skip
        if number >= LEAST_RATE * seconds:
            return f"{words} {number / seconds / 1e6:.1f} MB/s"
    used = after.children - before.children
    # On a busy machine a child that computes gets little CPU time.
    least = (_LEAST_OF_CHILD if waited_for else _LEAST_CPU) * seconds
    if used >= least or (used > 0 and before.wants_cpu and after.wants_cpu):
        child = f"{WAITS} {after.busiest}, which works" if after.busiest else ""
        return child or "waits for child processes, which work"
    same = after.lock == before.lock and after.woken - before.woken <= _WOKEN
    return STUCK if after.lock and same and used <= 0 else ""


def _lock(pid: int, threads: Collection[int]) -> tuple[str, int]:
    with suppress(OSError, ValueError, IndexError):
        folder = Path(f"/proc/{pid}/task")
        calls = {one: (folder / f"{one}/syscall").read_text("ascii").split() for one in threads}
        own = calls.get(pid, [])
        waits = (c[0] == _FUTEX or (c[0] == _AGAIN and c[2] in _WAIT) for c in calls.values())
        if own[0] == _FUTEX and own[4] == _FOR_EVER and all(waits):
            return " ".join(own), int((folder / f"{pid}/schedstat").read_text("ascii").split()[2])
    return "", 0


def _carried(before: Activity, after: Activity) -> tuple[int, int]:
    """Bytes sent and received in between; a new connection counts from its beginning."""
    sent = received = 0
    for one, (out, into) in after.connections.items():
        known = before.connections.get(one, (0, 0))
        sent, received = sent + out - known[0], received + into - known[1]
    return sent, received


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
                facts = dict(_pairs(text))
                writes = bool(int(facts["flags"], 8) & _ACCESS)
                yield (path, writes), int(facts["pos"])


def _transferred(pid: int) -> tuple[int, int]:
    """Bytes from and to storage, and bytes of system calls; with those of ended children."""
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        facts = {name: int(number) for name, number in _pairs(text)}
        return (
            facts.get("read_bytes", 0) + facts.get("write_bytes", 0),
            facts.get("rchar", 0) + facts.get("wchar", 0),
        )
    return 0, 0


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value


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
