"""Processes as ``/proc`` shows them, at a root that tests can replace.

Everything here reads; nothing needs more rights than the owner of a process has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from moediag.records import dataclass

# Libraries of a process that has loaded torch.
TORCH = (b"/libtorch_cpu", b"/libtorch_python", b"/libtorch.so")
# The two ends of a TCP connection, as the kernel writes them.
Connection = tuple[str, str]
ESTABLISHED, LISTENS = "01", "0A"
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address of an IPv6 socket
_INODE = 9  # index of a socket's inode in a line of /proc/net/tcp
_TICK = os.sysconf("SC_CLK_TCK")
_STARTED = 19  # index of the start time among the fields after the name


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at one moment."""

    pid: int
    ppid: int
    state: str
    """Letter of its main thread: R, S, D, T, Z."""
    cpu: float
    """User and system time of all threads in seconds."""
    started: int
    """Clock ticks since boot; together with the pid this identifies a process."""


@dataclass(frozen=True, slots=True)
class Proc:
    """A ``/proc`` file system. What cannot be read is empty."""

    root: Path = Path("/proc")

    def seen(self, pid: int) -> Seen | None:
        """The state of process ``pid``; None if there is none."""
        text = self.text(pid, "stat")
        # The name is in parentheses and may itself hold blanks and parentheses.
        fields = text[text.rfind(")") + 2 :].split()
        if len(fields) <= _STARTED:
            return None
        cpu = (int(fields[11]) + int(fields[12])) / _TICK
        return Seen(pid, int(fields[1]), fields[0], cpu, int(fields[_STARTED]))

    def owned(self, uid: int) -> dict[int, Seen]:
        """The processes of user ``uid``, by pid."""
        found = {}
        for name in os.listdir(self.root):  # noqa: PTH208 - many names, strings suffice
            if name.isdigit() and self.owner(int(name)) == uid:
                seen = self.seen(int(name))
                if seen is not None:
                    found[seen.pid] = seen
        return found

    def owner(self, pid: int) -> int | None:
        """The real user id of process ``pid``; None if there is no such process."""
        found = self.facts(pid, "status").get("Uid", "").split()
        return int(found[0]) if found else None

    def text(self, pid: int, name: str) -> str:
        """The content of ``/proc/PID/name``."""
        return self.data(pid, name).decode("utf-8", "replace")

    def data(self, pid: int, name: str) -> bytes:
        try:
            return (self.root / str(pid) / name).read_bytes()
        except OSError:
            return b""

    def facts(self, pid: int, name: str) -> dict[str, str]:
        """The ``Key: value`` lines of ``/proc/PID/name``."""
        lines = (line.partition(":") for line in self.text(pid, name).splitlines())
        return {key.strip(): value.strip() for key, colon, value in lines if colon}

    def inner_threads(self, pid: int) -> dict[int, tuple[int, str]]:
        """Of a process in an inner pid namespace, by the number of each thread there: its number
        here, and the letter of its state. Empty for other processes."""
        if len(self.facts(pid, "status").get("NSpid", "").split()) < 2:
            return {}
        found = {}
        for name in self.names(pid, "task"):
            facts = self.facts(pid, f"task/{name}/status")
            numbers = facts.get("NSpid", "").split()
            if name.isdigit() and numbers:
                found[int(numbers[-1])] = int(name), facts.get("State", "")[:1]
        return found

    def names(self, pid: int, name: str) -> list[str]:
        """The names in the folder ``/proc/PID/name``."""
        try:
            return os.listdir(self.root / str(pid) / name)  # noqa: PTH208 - strings suffice
        except OSError:
            return []

    def command(self, pid: int) -> tuple[str, ...]:
        """The words of its command line."""
        return tuple(self.text(pid, "cmdline").rstrip("\0").split("\0"))

    def environment(self, pid: int) -> Mapping[str, str]:
        """The variables that it was started with."""
        pairs = (item.partition("=") for item in self.text(pid, "environ").split("\0"))
        return {name: value for name, equals, value in pairs if equals}

    def maps(self, pid: int, *names: bytes) -> bool:
        """Whether it has mapped a file whose path holds one of ``names``."""
        mapped = self.data(pid, "maps")
        return any(name in mapped for name in names)

    def link(self, pid: int, name: str) -> str:
        """The target of the link ``/proc/PID/name``, or ""."""
        try:
            return os.readlink(self.root / str(pid) / name)  # noqa: PTH115 - text, not a path
        except OSError:
            return ""

    def open_files(self, pid: int) -> Iterator[tuple[int, str]]:
        """Yields (descriptor, target) of what it has open."""
        for name in self.names(pid, "fd"):
            if name.isdigit() and (target := self.link(pid, f"fd/{name}")):
                yield int(name), target

    def connections(self, pid: int, state: str = ESTABLISHED) -> set[Connection]:
        """Its TCP sockets in ``state``, as (own end, other end)."""
        inodes = {target for _, target in self.open_files(pid) if target.startswith("socket:[")}
        lines = (self.text(pid, name).splitlines()[1:] for name in ("net/tcp", "net/tcp6"))
        found = (line.split() for part in lines for line in part)
        return {
            (words[1].removeprefix(_MAPPED), words[2].removeprefix(_MAPPED))
            for words in found
            if len(words) > _INODE and words[3] == state and f"socket:[{words[_INODE]}]" in inodes
        }


def above(pid: int, every: Mapping[int, Seen]) -> Iterator[int]:
    """Yields the ancestors of ``pid`` among ``every``, its parent first."""
    known = {pid}
    while (seen := every.get(pid)) is not None and seen.ppid in every and seen.ppid not in known:
        pid = seen.ppid
        known.add(pid)
        yield pid


def below(pid: int, every: Mapping[int, Seen]) -> list[int]:
    """The descendants of ``pid`` among ``every``."""
    found: list[int] = []
    level = {pid}
    while level:
        level = {seen.pid for seen in every.values() if seen.ppid in level} - {pid, *found}
        found += sorted(level)
    return found
