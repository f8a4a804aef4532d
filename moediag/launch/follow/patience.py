"""How long ranks of a watched job may wait before it is reported as a hang.

If every rank waits in a collective or is stopped, nothing can progress: the watchdog's quiescence
window is enough. If a rank is elsewhere, an endless loop looks like a long evaluation, so a time
limit decides. It applies to the rank's own time, without waits for a CPU, and depends on the job's
history:

- a rank that cannot continue, as its main thread waits for a lock, without a time limit, which no
  thread of it and no child of it that does anything could release, or that has left training, or
  whose node is silent: ``patience`` seconds;
- any other: four times that. It may sleep between small pieces of work, wait for an answer over the
  network, or compute: a slow rank and an endless loop look the same;
- one whose stack shows compiling, importing, downloading, copying, loading or saving a checkpoint,
  that reads or writes files, or that waits for a child process that works: forty times that;
- each of these counts by itself: the time of a save is not that of the wait after it;
- a call over a slow network, whose connections carry bytes, has that longest time, too;
- ranks whose native stacks show that they wait for their devices, twice that they are in the same
  launch of a kernel, or in C++ for a collective, count as waiting; if devices are waited for, four
  times ``patience``: an evaluation also waits for its device at nearly every look;
- ranks in ``init_process_group`` count as waiting once every rank of the job has been there for
  that time;
- before a rank's first batch, forward or step and after a job's last call, it prepares or waits for
  what is no rank: the data, a lock, an upload. It is reported after four times ``patience`` if it
  is idle, as are the workers of its data loader, and early: no reason to end the job before the
  longest time. So is a rank that has not called ``init_process_group``, if all others are there,
  even if its process is nowhere to be seen, and one that does not end;
- never less than three times the longest pause from which the job recovered by itself;
- ranks that no supervisor sees count as computing.

Supervisors on other nodes observe the ranks there; see launch.nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from moediag.evidence.model import Stall
from moediag.launch.capture.activity import NETWORK, STUCK, WAITS
from moediag.launch.capture.py_spy import (
    in_collective,
    in_last_call,
    joins,
    launch,
    main_frames,
    on_device,
)
from moediag.launch.capture.shown_work import leaves, work_at_the_end, work_of
from moediag.launch.capture.worker_stacks import waits_for_data
from moediag.launch.follow.watchdog import Watchdog
from moediag.launch.rank_sample import RankSample
from moediag.result import wording

BUSY = 4.0
_BEGIN = 0.6  # of ``patience``: when stacks are read first, so that two looks come before the limit
AT_WORK = 40.0
_MEET = 2.0  # of ``patience``: all ranks may be in the rendezvous for so long
AS_BEFORE = 3.0
STARVED = 0.1  # share of elapsed time that counts for a rank that waits for a CPU or a disk
_LOOK_AGAIN = 10.0  # seconds between two reads of stacks: each stops a rank for milliseconds
_LOOKS = 0.3  # of ``patience``: the same, if that is less
_COMPARED = 2  # looks at a rank before it is reported: one shows no bytes and no CPU time
_LOOK_THERE = 10.0  # seconds that the supervisor of another node gets to read its ranks' stacks
# (ranks, with native frames): py-spy's JSON of the ranks that answer.
Stacks = Callable[[Sequence[int], bool], Mapping[int, bytes]]
# (stacks, whether the ranks are in communication): what each rank has done since the last call, see
# launch.capture.activity; "" for nothing.
Activities = Callable[[Mapping[int, bytes], bool], Mapping[int, str]]


class _Time:
    """A rank's own time in this pause."""

    def __init__(self) -> None:
        self.at_work = 0.0
        self.otherwise = 0.0
        self.since_look = 0.0  # what of ``otherwise`` came after the last look

    def add(self, seconds: float, works: bool) -> None:
        if works:
            self.at_work += seconds
        else:
            self.otherwise += seconds
            self.since_look += seconds

    def looked(self, works: bool) -> None:
        """Work that a look shows began after the look before."""
        if works:
            self.at_work += self.since_look
            self.otherwise -= self.since_look
        self.since_look = 0.0


class Patience:
    """Decides when a stall that the watchdog sees is a hang. ``stacks`` and ``activities`` are
    called for ranks that others wait for, at most every ten seconds of a pause, ``activities`` also
    for those that wait, every third of a window."""

    def __init__(
        self,
        watchdog: Watchdog,
        seconds: float,
        stacks: Stacks,
        activities: Activities = lambda *_: {},
    ) -> None:
        self.watchdog = watchdog
        self.seconds = seconds
        self.longest = 0.0  # longest pause that the job recovered from by itself
        self._stacks = stacks
        self._activities = activities
        self._listened = 0.0
        self._carries: dict[int, str] = {}  # ranks in a call whose connections carry bytes
        self._progress: tuple[tuple[int, int, bool], ...] = ()
        self._since = float("inf")
        self._looked = 0.0
        self._looks = 0  # in this pause
        self._joining = float("inf")  # when the stacks first showed all ranks in the rendezvous
        self._step = 0
        self._work: dict[int, str] = {}
        self._loading: set[int] = set()  # ranks that wait in their data loader
        self._fed: set[int] = set()  # those of them whose worker works
        self._on_device: set[int] = set()
        self._blocked: set[int] = set()
        self._joined: set[int] = set()  # ranks in the rendezvous
        self._leaving: set[int] = set()  # ranks of which only the end is left
        self._stuck: set[int] = set()  # ranks that wait for a lock that nothing will release
        self._slow: set[int] = set()  # ranks that did something else in this pause
        self._away: list[int] = []  # ranks that others have waited for longer than ``seconds``
        self._spins: set[int] = set()  # ranks in destroy_process_group, where NCCL uses a CPU
        self._launches: dict[int, object] = {}  # the launch in which the last look found a rank
        self._cpu: dict[int, float] = {}  # of each rank when the pause began
        # When each rank was observed, by its node's clock, or ours once that node is silent.
        self._last: dict[int, tuple[bool, float]] = {}
        self._last_cpu: dict[int, float] = {}
        self._own: dict[int, _Time] = {}  # length of the pause for each rank, by its own time
        self._seen: dict[int, list[str]] = {}  # the work of each rank in the looks of this pause
        self._present: Stall | None = None  # this pause, as far as ranks wait in it
        # The longest pause beyond ``seconds`` that ended: its length, and what ranks worked.
        self.slowest: tuple[Stall, float, Mapping[int, str]] | None = None

    @property
    def by_stack(self) -> Sequence[int]:
        """Ranks with a collective on their stack."""
        return sorted({*self.watchdog.by_stack, *self._blocked})

    def observe(
        self, now: float, samples: Sequence[RankSample], whole: bool = False
    ) -> Stall | None:
        """Returns the stall once it is a hang; None while the job runs or may continue. ``whole``:
        the samples are those of every rank of the job, and all are of this node."""
        progress = tuple((s.rank, s.progress, s.alive) for s in samples)
        stall = self.watchdog.observe(now, samples)
        if progress != self._progress:
            self._moved(now, samples)
            self._progress = progress
            return None
        self._away = []
        self._count(now, samples)
        live = [s for s in samples if s.alive and s.known]
        moving = [s for s in live if not s.stopped]
        if not moving or not all(s.known for s in samples):
            return None
        by_stack = stall.waiting if stall is not None else ()
        waiting = {s.rank for s in moving if self._waits(s, by_stack)}
        away = [s for s in live if s.rank not in waiting]
        quiet = now - self._since
        self._listen(now, quiet, waiting)
        if any(NETWORK in self._work_of(s) for s in moving if s.rank in waiting):
            self._present = self.watchdog.stall(live, sorted(waiting))
            if quiet < AT_WORK * self.seconds:
                return None
        if stall is not None and all(s.stopped for s in away):
            return stall
        if quiet < _BEGIN * self.seconds:
            return None
        if now - self._looked > min(_LOOK_AGAIN, _LOOKS * self.seconds):
            self._looked = now
            ended = len(live) < len(samples)
            self._look([s.rank for s in away if not s.stopped], not waiting, ended)
            self._meet(away, whole and not waiting)
        here = {s.rank for s in away if not s.unseen}
        outside = not waiting and self._outside({s.rank for s in away}, here, whole)
        devices = self._on_device | {s.rank for s in away if s.on_device}
        if outside:
            waiting = set(self._joined)
        else:
            waiting |= devices | self._blocked
        away = [s for s in away if s.rank not in waiting]
        if waiting or outside:
            self._present = self.watchdog.stall(live, sorted(waiting))
        # How long each has been away beyond its limit.
        beyond = min(
            (self._elapsed(s) - self._limit(s, outside or s.prepares) for s in away),
            default=quiet - (BUSY if devices else 1.0) * self.seconds,
        )
        if waiting and quiet >= self.seconds:
            self._away = sorted({s.rank for s in away} | devices)
        if not (waiting or outside) or beyond < 0 or quiet < AS_BEFORE * self.longest:
            return None
        if away and self._looks < _COMPARED:
            return None
        if beyond < _LOOK_THERE and not all(s.looked or s.silent or s.unseen for s in away):
            return None
        new = [s for s in away if outside or s.prepares]
        early = any(self._elapsed(s) < AT_WORK * self.seconds for s in new)
        return replace(self.watchdog.stall(live, sorted(waiting)), early=early)

    def _outside(self, away: set[int], here: set[int], whole: bool) -> bool:
        """Whether all other ranks wait in the rendezvous for some of the ranks that are ``away``
        from any call, or these are only left to end. Without the ``whole`` job, all those of them
        that are ``here`` have to be in the rendezvous."""
        for_some = set() < self._joined < away and (whole or self._joined == here)
        return for_some or set() < away <= self._leaving

    def pause(self, now: float, samples: Sequence[RankSample]) -> Stall | None:
        """The present pause if it is longer than the window and a rank waits. It may still end by
        itself; its ``window`` is how long it has lasted."""
        quiet = now - self._since
        live = [s for s in samples if s.alive and s.known]
        waiting = [s.rank for s in live if self._waits(s, self.by_stack)]
        if quiet < self.watchdog.window:
            return None
        if not waiting:
            here = [s.rank for s in live if not s.stopped and s.at is None]
            self._look(here, False, len(live) < len(samples))
            waiting = sorted(self._joined)
            if not waiting and not self._outside(set(here), set(), False):
                return None
        return replace(self.watchdog.stall(live, waiting), window=round(quiet, 1))

    def quiet(self, now: float) -> float:
        """How long no rank has made progress, in seconds."""
        return now - self._since

    @staticmethod
    def _waits(s: RankSample, by_stack: Sequence[int]) -> bool:
        inside = s.state == "in-collective" or s.blocked or s.rank in by_stack
        return inside and not s.silent and not s.stopped

    def _count(self, now: float, samples: Sequence[RankSample]) -> None:
        """Adds to each rank's own time. All time counts while a rank sleeps. While it wants a CPU,
        only its CPU time counts, because a busy machine also slows down an evaluation. Waiting for
        a disk counts in part."""
        for s in samples:
            clock = _clock(s, now)
            before = self._last.get(s.rank, clock)
            passed = max(0.0, clock[1] - before[1]) if clock[0] == before[0] else 0.0
            cpu = s.cpu - self._last_cpu.get(s.rank, s.cpu)
            own = min(passed, max(cpu, STARVED * passed)) if s.runnable else passed
            self._own.setdefault(s.rank, _Time()).add(own, bool(self._work_of(s)))
            if s.silent:  # the clock of its node cannot be read
                self._own[s.rank].otherwise = now - self._since
            self._last[s.rank], self._last_cpu[s.rank] = clock, s.cpu

    def _look(self, ranks: Sequence[int], native: bool, ended: bool) -> None:
        """Reads from the stacks of ``ranks`` what they do, whether they wait in a collective and,
        with ``native``, whether they wait for their devices. ``ended``: a rank has ended."""
        self._looks += 1
        found = self._stacks(ranks, native)
        active = dict(self._activities({rank: found.get(rank, b"") for rank in ranks}, False))
        self._loading = {r for r, dump in found.items() if waits_for_data(main_frames(dump))}
        # A worker of a data loader may loop for ever: it is no child that works.
        works = {r for r in self._loading if active.get(r, "").startswith(WAITS)}
        stuck = {rank for rank, words in active.items() if words == STUCK}
        active = {rank: words for rank, words in active.items() if rank not in works | stuck}
        self._fed = works
        self._leaving = {rank for rank, dump in found.items() if leaves(dump, ended)}
        shown = {
            rank: work_at_the_end(dump) if rank in self._leaving else work_of(dump)
            for rank, dump in found.items()
        }
        self._work = {
            rank: words
            for rank in ranks
            if (words := ": ".join(filter(None, (shown.get(rank), active.get(rank)))))
        }
        self._slow |= active.keys() - self._work.keys() if self._looks > 1 else set()
        self._stuck = stuck - self._slow - self._loading
        self._note(self._work)
        for rank in ranks:
            self._own.setdefault(rank, _Time()).looked(rank in self._work)
        launches = {rank: launch(dump) for rank, dump in found.items()} if native else {}
        held = {
            r for r, callers in launches.items() if callers and callers == self._launches.get(r)
        }
        self._launches = dict(launches)
        # An evaluation on one rank also waits for its device.
        self._on_device = {
            rank for rank, dump in found.items()
            if native and (on_device(dump) or rank in held) and rank not in self._work
        }  # fmt: skip
        self._spins = {rank for rank, dump in found.items() if in_last_call(dump)}
        self._blocked = {rank for rank, dump in found.items() if in_collective(dump)}
        self._joined = {rank for rank, dump in found.items() if joins(dump)}

    def _listen(self, now: float, quiet: float, waiting: Collection[int]) -> None:
        """Notes which ranks in a call still send or receive: a slow network is no hang."""
        third = self.watchdog.window / 3
        if waiting and quiet >= third and now - self._listened >= third:
            self._listened = now
            found = self._activities(dict.fromkeys(waiting, b""), True)
            self._carries = {rank: words for rank, words in found.items() if words}
            self._note(self._carries)

    def _meet(self, away: Sequence[RankSample], whole: bool) -> None:
        """Notes since when all ranks have been in the rendezvous."""
        if not whole or {s.rank for s in away} != self._joined:
            self._joining = float("inf")
            return
        self._joining = min(self._joining, self._looked)
        if self._looked - self._joining >= (_MEET - _BEGIN) * self.seconds:
            self._blocked = set(self._joined)

    def _moved(self, now: float, samples: Sequence[RankSample]) -> None:
        quiet = now - self._since
        if self._step > 1:  # skip the imports and the first compile
            self.longest = max(self.longest, quiet)
        if self._present and quiet > (self.slowest[1] if self.slowest else self.seconds):
            self.slowest = self._present, quiet, self.worked
        self._present = None
        self._step = max((s.step for s in samples), default=0)
        self._since, self._looked, self._looks = now, -_LOOK_AGAIN, 0
        self._work, self._on_device, self._blocked = {}, set(), set()
        self._listened, self._carries = -_LOOK_AGAIN, {}
        self._loading, self._fed, self._joined, self._leaving = set(), set(), set(), set()
        self._stuck, self._slow, self._away = set(), set(), []
        self._spins, self._launches = set(), {}
        self._seen = {}
        self._joining = float("inf")
        self._cpu = {s.rank: s.cpu for s in samples}
        self._last = {s.rank: _clock(s, now) for s in samples}
        self._last_cpu, self._own = dict(self._cpu), {}

    def _work_of(self, s: RankSample) -> str:
        return "" if s.silent else s.work or self.work.get(s.rank, "")

    def _elapsed(self, s: RankSample) -> float:
        """How long the rank has done what it does now, in this pause."""
        own = self._own[s.rank]
        return own.at_work if self._work_of(s) else own.otherwise

    def _limit(self, s: RankSample, early: bool) -> float:
        own = self._own[s.rank]  # on a busy machine a rank that computes has little of the time
        least = 0.1 * (STARVED if s.runnable else 1.0) * (own.at_work + own.otherwise)
        spent = s.cpu - self._cpu.get(s.rank, 0.0)
        computes = spent > least and s.rank not in self._spins
        if self._work_of(s) or (early and not s.unseen and (computes or s.rank in self._fed)):
            return AT_WORK * self.seconds
        ended = s.silent or s.rank in self._spins
        at_once = not early and (ended or (s.rank in self._stuck and not computes))
        return self.seconds if at_once else BUSY * self.seconds

    def _note(self, work: Mapping[int, str]) -> None:
        for rank, words in work.items():
            self._seen.setdefault(rank, []).append(words)

    @property
    def worked(self) -> Mapping[int, str]:
        """The work of each rank that most looks of this pause show; the earlier of equal ones."""
        found = {}
        for rank, looks in self._seen.items():
            kinds = {words: " ".join(words.split()[:2]) for words in looks}
            most = Counter(map(kinds.__getitem__, looks)).most_common(1)[0][0]
            found[rank] = next(words for words in reversed(looks) if kinds[words] == most)
        return found

    def doubt(self, now: float) -> str:
        """Which ranks the others have waited for, for longer than they would for one that is stuck,
        and what these do; "" if none."""
        if not self._away:
            return ""
        does = "; ".join(f"rank {r} {words}" for r, words in self.work.items() if r in self._away)
        words = f"{wording.ranks(self._away)} may be slow: others have waited for"
        words += f" {self.quiet(now):.0f} s"
        return f"{words} ({does})" if does else words

    @property
    def looked(self) -> bool:
        """Whether stacks were read in this pause."""
        return self._looked > 0.0

    @property
    def on_device(self) -> frozenset[int]:
        """Ranks whose stack shows that they wait for their devices."""
        return frozenset(self._on_device)

    @property
    def work(self) -> Mapping[int, str]:
        """The work that each rank's stack or its connections show."""
        return self._carries | self._work


def _clock(s: RankSample, now: float) -> tuple[bool, float]:
    """Whether the clock is that of this node, and its time."""
    return (True, now) if s.at is None else (False, s.at)
