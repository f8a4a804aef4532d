"""Why a rank outside communication cannot continue, as far as its process shows it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from moediag.launch.attach.proc import Proc, Seen, below
from moediag.records import dataclass

STOPPED = "is stopped by a signal (SIGSTOP)"
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/__main__.py", "/debugpy/")
_LOADER = "torch/utils/data/dataloader.py"
# `1: -> FLOCK  ADVISORY  WRITE 1235 08:01:5678 0 EOF`; the arrow marks one that waits.
_LOCK = re.compile(
    r"^(?P<number>\d+):(?P<waits> ->)? +\S+ +\S+ +\S+ +(?P<pid>-?\d+) +\w+:\w+:(?P<inode>\d+) "
)


@dataclass(frozen=True, slots=True)
class FileLock:
    """A lock of a file that a process waits for."""

    holder: int
    """Its pid; 0 or -1 if the kernel does not tell."""
    inode: int


def file_locks(proc: Proc) -> dict[int, FileLock]:
    """The locks that processes wait for, by the pid of the one that waits."""
    holders: dict[str, int] = {}
    found = {}
    try:
        text = (proc.root / "locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    for line in text.splitlines():
        lock = _LOCK.match(line)
        if lock is not None and not lock["waits"]:
            holders[lock["number"]] = int(lock["pid"])
        elif lock is not None:
            found[int(lock["pid"])] = FileLock(holders.get(lock["number"], 0), int(lock["inode"]))
    return found


def path_of(proc: Proc, pid: int, inode: int) -> str:
    """The file with ``inode`` that process ``pid`` has open, or ""."""
    for number, target in proc.open_files(pid):
        try:
            if os.stat(proc.root / str(pid) / "fd" / str(number)).st_ino == inode:  # noqa: PTH116
                return target
        except OSError:
            continue
    return ""


def held(
    proc: Proc,
    pid: int,
    state: str,
    frames: Sequence[Mapping[str, object]],
    ranks: Mapping[int, int],
    every: Mapping[int, Seen],
) -> str:
    """Words after "Rank 1 "; "" if nothing shows why it does not continue. ``frames``: of its main
    thread, as py-spy names them. ``ranks``: pid -> rank."""
    if state == "T":
        return STOPPED
    locks = file_locks(proc)
    lock = locks.get(pid)
    if lock is not None:
        path = path_of(proc, pid, lock.inode)
        what = f"the lock of the file {Path(path).name}" if path else "a file lock"
        return f"waits for {what}, which {_who(proc, lock.holder, ranks)} holds"
    files = [str(frame.get("filename", "")) for frame in frames]
    if any(part in file for file in files[:8] for part in _DEBUGGERS):
        return "is stopped in a debugger"
    if state == "D":
        where = proc.text(pid, "wchan").strip().strip("0")
        return f"is blocked in the kernel{f' ({where})' if where else ''}"
    if any(file.endswith(_LOADER) for file in files):
        return _by_worker(proc, pid, locks, every)
    return ""


def _who(proc: Proc, pid: int, ranks: Mapping[int, int]) -> str:
    if pid in ranks:
        return f"rank {ranks[pid]}"
    if pid <= 0:
        return "another process"
    name = proc.text(pid, "comm").strip()
    return f"process {pid} ({name})" if name else f"process {pid}"


def _by_worker(
    proc: Proc, pid: int, locks: Mapping[int, FileLock], every: Mapping[int, Seen]
) -> str:
    """Of a rank that waits for data: what stops a process of its loader."""
    for child in below(pid, every):
        if every[child].state == "T":
            return f"waits for its data loader, whose process {child} is stopped (SIGSTOP)"
        if child in locks:
            path = path_of(proc, child, locks[child].inode)
            what = f"the lock of the file {Path(path).name}" if path else "a file lock"
            return f"waits for its data loader, whose process {child} waits for {what}"
    return ""
