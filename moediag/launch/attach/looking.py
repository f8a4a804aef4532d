"""Looks at the ranks of a running job until it is clear whether they progress.

Nothing is loaded into a process and no signal is sent. A process that sleeps is read without
stopping it; one that runs is stopped for the milliseconds that py-spy needs. Two looks, two seconds
apart, decide a clear picture: ranks moved on, or the kernel tells that all have waited for longer
than ``patience``. Otherwise a third follows; if ranks then wait, and it is not known for how long,
further looks follow until ``patience`` is over: a save or an evaluation looks like a hang at first.
If others wait for a rank that may be slow, four times as long counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field, replace

from moediag.evidence import looks
from moediag.evidence.looks import Looks, RankLook
from moediag.launch.attach import held, spy
from moediag.launch.attach.proc import TORCH, Proc, Seen
from moediag.launch.capture.activity import STUCK, Activity, look, work
from moediag.launch.capture.network import bytes_by_socket
from moediag.launch.capture.py_spy import (
    in_collective,
    joins,
    main_frames,
    on_device,
    python_threads,
)
from moediag.launch.capture.shown_work import waits_for_child, work_of
from moediag.launch.processes import Process
from moediag.records import dataclass

EVERY = 2.0  # seconds between two looks
LEAST = 3  # looks, if two do not give a clear picture
_SLOWER = 5.0  # seconds between two looks, once the first ones did not decide
_TOOL = 10.0  # seconds for py-spy
_NATIVE = 20.0  # seconds for native frames of a process that has CUDA's libraries
_ASLEEP_CPU = 0.05  # of one CPU: a rank that waits uses less
_WORKS_CPU = 0.2
_OTHER_THREADS = 0.05  # of one CPU, by threads other than the main one: a rank that only spins
_SAMPLE = 0.1  # seconds between two looks at the state alone
_DRIVERS = (b"/libcuda.so", b"/libamdhip64.so")
_MOST_AT_ONCE = 16  # ranks
_NATIVE_AT_ONCE = 4  # ranks: each read of native frames keeps a CPU busy for a second

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A process to look at."""

    rank: int
    process: Process


@dataclass(frozen=True, slots=True)
class One:
    """One look at one process."""

    at: float
    seen: Seen | None
    """None: it is gone."""
    asleep: float | None = None
    """Seconds since the main thread last ran; None if the kernel does not tell."""
    main_cpu: float = 0.0
    dump: spy.Dump = field(default_factory=spy.Dump)
    activity: Activity | None = None
    device: bool = False
    """It waits for its device, by its native frames."""


class Looker:
    """Looks at one rank again and again."""

    def __init__(self, target: Target, proc: Proc, local_values: bool) -> None:
        self.target = target
        self.proc = proc
        self.local_values = local_values
        self.taken: list[One] = []
        self.native = spy.Dump()
        self.states: list[str] = []  # letters, of the looks and between them

    @property
    def pid(self) -> int:
        return self.target.process.pid

    def sample(self) -> None:
        seen = self.proc.seen(self.pid)
        if seen is not None:
            self.states.append(seen.state)

    def look(self) -> None:
        seen = self.proc.seen(self.pid)
        now = time.monotonic()
        if seen is None or seen.started != self.target.process.started or seen.state in "ZX":
            self.taken.append(One(now, None))
            return
        self.states.append(seen.state)
        slept = asleep(self.proc, self.pid)
        main = main_cpu(self.proc, self.pid)
        dump = self._dump(seen.state, main)
        active = None
        if dump.json:  # a slow network is no hang
            moved = bytes_by_socket() if _inside(dump.json) else None
            numbers = python_threads(dump.json)
            active = look(self.target.process, time.monotonic(), moved, numbers)
        device = False
        if seen.state == "R" and self.proc.maps(self.pid, *_DRIVERS):
            device = on_device(spy.native(self.pid, _TOOL).json)
        self.taken.append(One(now, seen, slept, main, dump, active, device))

    def _dump(self, state: str, main: float) -> spy.Dump:
        """Its stacks; those of the look before, if its main thread has not run since. ``main``: CPU
        seconds of that thread, in nanoseconds of the scheduler."""
        if self.taken and main and main == self.taken[-1].main_cpu and self.taken[-1].dump.json:
            return self.taken[-1].dump
        found = spy.dump(self.pid, _TOOL, pause=state not in "ST", local_values=self.local_values)
        if found.lost and state != "T":  # it may have run meanwhile
            found = spy.dump(self.pid, _TOOL, local_values=self.local_values)
        return found

    def result(self, ranks: Mapping[int, int], every: Mapping[int, Seen]) -> RankLook:
        """What all looks together say. ``ranks``: pid -> rank."""
        found = judge(self.taken, self.states)
        if found.does in (looks.IDLE, looks.STOPPED):
            frames = main_frames(self.taken[-1].dump.json)
            why = held.held(self.proc, self.pid, found.state, frames, ranks, every)
            found = replace(found, held=why)
        return replace(found, pid=self.pid)

    def in_native_code(self) -> str:
        """What a rank at rest waits for in C++ that Python called, as in a backward pass: WAITS for
        communication, ON_DEVICE, or "". Native frames tell; they are read once, as this stops the
        process for a second, and kept as its stack."""
        if not self.native.json and not self.native.lost:
            self.native = spy.native(self.pid, _NATIVE)
        found = self.native.json
        if in_collective(found, spins=True):
            return looks.WAITS
        return looks.ON_DEVICE if on_device(found) else ""

    @property
    def dump(self) -> spy.Dump:
        """The rank's last stacks, with native frames if these were read."""
        return self.native if self.native.json else self.taken[-1].dump


def judge(taken: Sequence[One], states: Sequence[str]) -> RankLook:
    """What a rank did, from looks at it and the states of its main thread between them."""
    first, last = taken[0], taken[-1]
    if last.seen is None or first.seen is None:
        return RankLook(0, looks.GONE)
    window = last.at - first.at
    cpu = (last.seen.cpu - first.seen.cpu) / window if window > 0 else 0.0
    main = (last.main_cpu - first.main_cpu) / window if window > 0 else 0.0
    still = round(max(window, last.asleep or 0.0), 1)
    numbers = spy.values(last.dump.json) if last.dump.json else {}
    made = RankLook(0, looks.MOVES, cpu=round(cpu, 3), state=last.seen.state, values=numbers)
    if last.seen.state == "T":
        since = still if all(state == "T" for state in states) else last.asleep or 0.0
        return replace(made, does=looks.STOPPED, still=round(since, 1))
    dumps = [one.dump.json for one in taken]
    if not all(dumps):
        return replace(made, does=looks.UNREAD, still=still if cpu <= _ASLEEP_CPU else 0.0)
    same = len({spy.places(d) for d in dumps}) == 1
    same = same and len({tuple(spy.values(d).items()) for d in dumps}) == 1
    inside = [one.device or _inside(one.dump.json) for one in taken]
    if all(inside):
        if not same:
            return made
        if done := _by_proc(taken):
            return replace(made, does=looks.WORKS, words=done)
        spins = main > _WORKS_CPU and cpu - main <= _OTHER_THREADS
        if cpu <= _ASLEEP_CPU or spins:
            does = looks.WAITS if all(map(_inside, dumps)) else looks.ON_DEVICE
            return replace(made, does=does, still=round(window, 1) if spins else still)
        return replace(made, does=looks.WORKS, words="computes and communicates")
    if any(inside):
        return made
    by_proc = _by_proc(taken)
    stuck = by_proc == STUCK
    done = ": ".join(filter(None, (work_of(last.dump.json), "" if stuck else by_proc)))
    busy = sum(state in "RD" for state in states) > _WORKS_CPU * len(states)
    if done or cpu > _WORKS_CPU or busy:
        return replace(made, does=looks.WORKS, words=done or "computes")
    return replace(made, does=looks.IDLE, still=still, stuck=stuck) if same else made


def _inside(dump: bytes) -> bool:
    """Whether the main thread is in communication, or joins its group."""
    return in_collective(dump, spins=True) or joins(dump)


def _by_proc(taken: Sequence[One]) -> str:
    """What a rank did by its files, connections and children."""
    active = [one.activity for one in taken if one.activity is not None]
    waited_for = waits_for_child(taken[-1].dump.json)
    return work(active[0], active[-1], waited_for) if active else ""


def asleep(proc: Proc, pid: int) -> float | None:
    """Seconds since the main thread of ``pid`` last ran, by the scheduler's clock; None where the
    kernel does not tell."""
    with suppress(OSError, ValueError, KeyError):
        text = (proc.root / "thread-self" / "sched").read_text(encoding="ascii")
        lines = (line.partition(":") for line in text.splitlines())
        now = next(float(value) for key, _, value in lines if key.strip() == "se.exec_start")
        then = float(proc.facts(pid, "sched")["se.exec_start"])
        return max(0.0, (now - then) / 1000)
    return None


def main_cpu(proc: Proc, pid: int) -> float:
    """CPU seconds of the main thread."""
    fields = proc.text(pid, f"task/{pid}/schedstat").split()
    return int(fields[0]) / 1e9 if fields else 0.0


# ------------------------------------------------------------------------ all ranks


class LookingJob:
    """The processes of one job, looked at together."""

    def __init__(
        self,
        targets: Sequence[Target],
        patience: float,
        proc: Proc | None = None,
        local_values: bool = True,
    ) -> None:
        self.proc = proc or Proc()
        self.patience = patience
        self.lookers = [Looker(target, self.proc, local_values) for target in targets]

    def run(self, known: Looks, progress: OnProgress = lambda _: None) -> Looks:
        """Looks until the looks decide, or ``patience`` is over. ``known``: what is known of the
        job without looking at it."""
        begun = time.monotonic()
        with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(self.lookers) or 1)) as pool:
            number = 0
            while True:
                list(pool.map(Looker.look, self.lookers))
                number += 1
                passed = time.monotonic() - begun
                if number == LEAST - 1 and (early := self._clear(known, passed)) is not None:
                    return early
                if number >= LEAST:
                    found = self.found(known, passed)
                    longest = self.patience * (looks.BUSY if found.slow else 1.0)
                    if found.stands or found.progresses or passed > longest + 0.5:
                        return found
                    if not any(look.at_rest for look in found.ranks.values()):
                        return found
                    if number == LEAST:
                        progress(f"ranks wait; looking for up to {longest:.0f} s")
                self._pause(EVERY if number < LEAST else min(_SLOWER, self.patience / 4))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_SAMPLE, left))
            for looker in self.lookers:
                looker.sample()

    def found(self, known: Looks, passed: float) -> Looks:
        """What the looks so far say, ``passed`` seconds after the first."""
        made = self._by_python_frames(known, passed)
        return made if made.progresses else self._by_native_frames(made)

    def _clear(self, known: Looks, passed: float) -> Looks | None:
        """What the looks so far say, if more would say the same."""
        made = self._by_python_frames(known, passed)
        if made.doing(looks.MOVES) and not made.doing(looks.STOPPED):
            return made
        unknown = [r for r in made.doing(looks.IDLE) if r not in made.held]
        return made if made.stands and not unknown else None

    def _by_python_frames(self, known: Looks, passed: float) -> Looks:
        ranks = {looker.pid: looker.target.rank for looker in self.lookers}
        owner = self.proc.owner(self.lookers[0].pid) if self.lookers else None
        every = self.proc.owned(owner) if owner is not None else {}
        found = {looker.target.rank: looker.result(ranks, every) for looker in self.lookers}
        return replace(known, seconds=round(passed, 1), patience=self.patience, ranks=found)

    def _by_native_frames(self, found: Looks) -> Looks:
        """``found``, in which ranks wait that only seemed to be outside communication."""
        idle = [one for one in self.lookers if found.ranks[one.target.rank].does == looks.IDLE]
        idle = [one for one in idle if not found.ranks[one.target.rank].held]
        idle = [one for one in idle if self.proc.maps(one.pid, *TORCH)]
        with ThreadPoolExecutor(max_workers=_NATIVE_AT_ONCE) as pool:
            inside = list(pool.map(Looker.in_native_code, idle))
        ranks = dict(found.ranks)
        for one, does in zip(idle, inside, strict=True):
            rank = one.target.rank
            if does:
                ranks[rank] = replace(ranks[rank], does=does)
            elif one.native.lost:  # it may wait where Python does not show it
                ranks[rank] = replace(ranks[rank], does=looks.UNREAD)
        return replace(found, ranks=ranks)

    def lost(self) -> list[str]:
        """Native frames that were wanted and could not be read."""
        return [f"rank {one.target.rank}: native frames ({one.native.lost})"
                for one in self.lookers if one.native.lost]  # fmt: skip

    def dumps(self) -> dict[int, spy.Dump]:
        """The last stacks of each rank."""
        return {one.target.rank: one.dump for one in self.lookers if one.taken}
