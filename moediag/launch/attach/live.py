"""What the ranks of a running job do now. No process is stopped, and nothing is concluded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from moediag.evidence.rank_stacks import in_collective, parse_pyspy, stand, that_counts
from moediag.launch.attach import gpus, spy
from moediag.launch.attach.looking import Target, asleep, main_cpu
from moediag.launch.attach.proc import Proc
from moediag.records import dataclass

_TOOL = 5.0  # seconds
_GPUS = 2.0  # seconds for nvidia-smi
_AT_ONCE = 8  # ranks
_WORKS_CPU = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Now:
    """One rank."""

    rank: int
    does: str
    """``waits in all_reduce``, ``computes``, ``sleeps``, ``stopped``, ``gone``."""
    line: str = ""
    """The innermost line of the user's program: ``train.py:12 step``; in parentheses, why it is not
    known."""
    since: float = 0.0
    """Seconds since its main thread last ran."""
    cpu: float | None = None
    """Share of one CPU since the last look."""
    memory: int = 0
    """Resident bytes."""
    step: str = ""
    gpu: float | None = None
    """Share of time that its GPU computes; None if that is not known."""


class Live:
    """Looks at the same ranks again and again."""

    def __init__(self, targets: Sequence[Target], proc: Proc | None = None) -> None:
        self.proc = proc or Proc()
        self.ranks = [_One(target, self.proc) for target in targets]

    def look(self) -> list[Now]:
        pids = {one.target.process.pid for one in self.ranks}
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            asked = pool.submit(gpus.busy, pids, _GPUS) if gpus.present() else None
            found = list(pool.map(_One.look, self.ranks))
            busy = asked.result()[0] if asked is not None else {}
        of = {one.target.rank: one.target.process.pid for one in self.ranks}
        return [replace(now, gpu=busy.get(of[now.rank])) for now in found]


class _One:
    def __init__(self, target: Target, proc: Proc) -> None:
        self.target = target
        self.proc = proc
        self._main = 0.0
        self._dump = spy.Dump()
        self._cpu: tuple[float, float] | None = None

    def look(self) -> Now:
        rank, process = self.target.rank, self.target.process
        seen = self.proc.seen(process.pid)
        if seen is None or seen.started != process.started or seen.state in "ZX":
            return Now(rank, "gone")
        before, self._cpu = self._cpu, (time.monotonic(), seen.cpu)
        passed = self._cpu[0] - before[0] if before is not None else 0.0
        cpu = (seen.cpu - before[1]) / passed if before is not None and passed else None
        main = main_cpu(self.proc, process.pid)
        if not main or main != self._main or not self._dump.json:
            self._main = main
            dump = spy.dump(process.pid, _TOOL, pause=False)
            self._dump = dump if dump.json or not self._dump.json else self._dump
        frames = self._dump.json
        stack = that_counts(parse_pyspy(frames.decode("utf-8", "replace")))
        waits = stack is not None and in_collective(stack)
        if seen.state == "T":
            does = "stopped"
        elif stack is not None and waits:
            does = f"waits in {stand(stack, ()).partition(',')[0]}"
        else:
            does = "computes" if (cpu or 0.0) > _WORKS_CPU or seen.state == "R" else "sleeps"
        line = next(_lines(frames), "") if frames else f"({self._dump.lost})"
        values = spy.values(frames)
        return Now(rank, does, line, asleep(self.proc, process.pid) or 0.0, cpu,
                   _memory(self.proc, process.pid), values.get("step", ""))  # fmt: skip


def _lines(dump: bytes) -> Iterator[str]:
    for frame in spy.users_frames(dump):
        name = str(frame.get("filename", "")).rpartition("/")[2]
        yield f"{name}:{frame.get('line')} {frame.get('name')}"


def _memory(proc: Proc, pid: int) -> int:
    with suppress(ValueError, IndexError):
        return int(proc.text(pid, "statm").split()[1]) * _PAGE
    return 0
