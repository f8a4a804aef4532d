"""Finds the processes of a launch in /proc.

A process belongs to a launch if it is in the process group or session of the root process, descends
from it, or was started with the launch's marker in its environment (a forked child shows its
parent's environment). Known processes are identified by pid and start time: a process orphaned
later is still found, and another process that reuses its pid is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from moediag import protocol
from moediag.records import dataclass

ENV_LAUNCH = "MOEDIAG_LAUNCH"  # the marker: a token unique to one launch
NEVER = -1
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcStat:
    """One line of /proc/PID/stat."""

    pid: int
    state: str
    """State of the main thread: R running or runnable, S sleeping, D waiting for a disk, T stopped,
    Z zombie."""
    ppid: int
    group: int
    session: int
    cpu: float
    """User and system time of all threads in seconds."""
    started: int
    """Clock ticks since boot; together with the pid this identifies a process."""
    reaped: float = 0.0
    """CPU time of its ended children and of theirs in seconds."""

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"

    @property
    def process(self) -> Process:
        return Process(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class Process:
    """One process; never another that reuses its pid."""

    pid: int
    started: int  # clock ticks since boot; NEVER matches no process

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has ``pid`` now."""
        stat = read_stat(pid)
        return cls(pid, NEVER) if stat is None else stat.process

    def stat(self) -> ProcStat | None:
        """Its present state; None if it is gone."""
        stat = read_stat(self.pid)
        return stat if stat is not None and stat.started == self.started else None

    @property
    def epoch(self) -> float:
        """When it started, in seconds since 1970. Raises OSError without /proc."""
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return time.time() - uptime + self.started / _TICK

    @property
    def alive(self) -> bool:
        return (stat := self.stat()) is not None and stat.alive

    def send(self, sig: int) -> None:
        """Sends signal ``sig``; does nothing if the process is gone, even if its pid is reused."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, sig)


def read_stat(pid: int) -> ProcStat | None:
    """Returns the present state of process ``pid``; None if there is no such process."""
    f = protocol.stat_fields(pid)
    if not f:
        return None
    cpu, reaped = ((int(f[i]) + int(f[i + 1])) / _TICK for i in (11, 13))
    return ProcStat(pid, f[0], int(f[1]), int(f[2]), int(f[3]), cpu, int(f[19]), reaped)


def all_stats() -> dict[int, ProcStat]:
    """Returns every visible process of this machine, by pid."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - called often, strings suffice
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            found[stat.pid] = stat
    return found


def oom_kills() -> int | None:
    """Returns the number of OOM kills on this machine since boot; None if the kernel does not count
    them (before Linux 4.13)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def is_marked(pid: int, token: str) -> bool:
    """Whether ``pid`` was started with the marker ``token`` in its environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{ENV_LAUNCH}={token}".encode() in environment.split(b"\0")


def catches(pid: int, sig: signal.Signals) -> bool:
    """Whether ``pid`` handles ``sig``, which would otherwise end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (sig - 1) & 1)
    return False


class Family:
    """All processes of one launch, except those in ``keep`` (the host outlives its trials)."""

    def __init__(self, root: int, token: str, keep: Iterable[int] = ()) -> None:
        self.root = root
        self.token = token
        self.keep = {os.getpid(), *keep}
        self._known: dict[int, int] = {}  # pid -> start time
        self._unrelated: set[tuple[int, int]] = set()
        if (stat := read_stat(root)) is not None:
            self._known[root] = stat.started

    def alive(self) -> dict[int, ProcStat]:
        """Members that still run. Zombies do not count: they hold only an exit status."""
        stats = {p: s for p, s in all_stats().items() if s.alive and p not in self.keep}
        ours = {
            p for p, started in self._known.items() if p in stats and stats[p].started == started
        }
        # Repeat until nothing is added: a child may have a lower pid than its parent.
        grown = True
        while grown:
            groups = {stats[p].group for p in ours} | {stats[p].session for p in ours}
            found = {
                pid
                for pid, s in stats.items()
                if pid not in ours
                and (s.ppid in ours or s.group in groups or s.session in groups or self._marked(s))
            }
            ours |= found
            grown = bool(found)
        self._known = {pid: stats[pid].started for pid in ours}
        self._unrelated.intersection_update((pid, s.started) for pid, s in stats.items())
        return {pid: stats[pid] for pid in ours}

    def _marked(self, stat: ProcStat) -> bool:
        """Whether a process has the marker. An unrelated process is checked only once, because it
        cannot get the marker later."""
        key = (stat.pid, stat.started)
        if key not in self._unrelated:
            if is_marked(stat.pid, self.token):
                return True
            self._unrelated.add(key)
        return False

    def signal(self, sig: signal.Signals) -> None:
        """Sends ``sig`` to every living member; to whole process groups if all their processes are
        members, so that a child forked meanwhile also gets it."""
        alive = self.alive()
        groups = {s.group for s in alive.values()}
        kept = {s.group for p in self.keep if (s := read_stat(p)) is not None}
        for group in groups - kept:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sig)
        for stat in alive.values():
            if stat.group in kept:
                stat.process.send(sig)

    def wait(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all members are gone, and returns True; or until ``seconds`` are over or
        ``stop`` returns True. A stopped member is continued: until then it takes no signal but
        SIGKILL. It may stop late, where SIGSTOP came before it was scheduled again."""
        deadline = time.monotonic() + seconds
        while members := self.alive():
            for stat in members.values():
                if stat.state == "T":
                    stat.process.send(signal.SIGCONT)
            if stop() or time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True
