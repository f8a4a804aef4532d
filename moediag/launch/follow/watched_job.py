"""Follows a watched job. Finds ranks as they start and detects unreported ends. Reports a stall or
a death immediately, while the job still runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

from moediag import protocol
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import UNTOLD, ExitStatus, Stall
from moediag.evidence.signal_names import status_of
from moediag.launch import shutdown
from moediag.launch.base import Running
from moediag.launch.capture import activity, dumps, network, source_files
from moediag.launch.capture.activity import Activity
from moediag.launch.capture.py_spy import python_frames, python_threads
from moediag.launch.capture.shown_work import waits_for_child
from moediag.launch.capture.token_counts import last_loads
from moediag.launch.follow.patience import Patience
from moediag.launch.follow.seen import slow, traces
from moediag.launch.follow.supervise import NATIVE, Supervisor
from moediag.launch.nodes.declared import Declared
from moediag.launch.nodes.other_nodes import OtherNodes
from moediag.launch.processes import Process
from moediag.launch.rank_sample import RankSample
from moediag.launch.settings import LaunchOptions, OnProgress
from moediag.launch.unnamed import unnamed

AFTER_DEATH = 5.0  # seconds that the rest of a job gets to end before a death is reported
LATE_RANKS = 60.0  # seconds after which moediag no longer waits for a missing rank
SEARCH_EVERY = 2.0  # seconds between two searches for ranks that have not named themselves
STALE = 30.0  # seconds after which what a rank did before is no longer compared
LOADS_EVERY = 5.0  # seconds between two reads of tokens per expert


class Then(Enum):
    """What to do with the job after a stall or a death was reported."""

    WATCH = "keep watching"
    AGAIN = "tell again once the stall is no longer early"
    LEAVE = "wait for its end"
    END = "end it"


# The second argument tells whether a job that stood still does so even now.
OnTrouble = Callable[[LaunchRecord, Callable[[], bool]], Then]


class JobSupervisor(Supervisor):
    """Follows one attempt: the ranks that were started together. ``again`` is set if the attempt
    ended because the job's launcher restarted its ranks."""

    launcher = "the job"

    def __init__(
        self,
        running: Running,
        run_folder: Path,
        attempt: int,
        options: LaunchOptions,
        on_progress: OnProgress | None,
        on_trouble: OnTrouble,
        shared: Path | None = None,
    ) -> None:
        folder = run_folder / protocol.attempt_folder(attempt)
        trial = protocol.Trial(
            "job", "job", "watched", task=protocol.WatchTask(), timeout=float("inf")
        )
        super().__init__(running, trial, folder, 0, options, on_progress)
        self.backend = ""  # unknown; the ranks' logs may show it
        self.again = False
        self._next = run_folder / protocol.attempt_folder(attempt + 1)
        self._on_trouble = on_trouble
        self._ends = False
        self._leaves = False
        self._again = False
        self._told_death = False
        self._told_at: tuple[tuple[int, int], ...] | None = None
        self._gone = frozenset[int]()  # ranks that had ended when the stall was seen
        self._expected: int | None = None
        self._local: int | None = None
        self._last_found = time.monotonic()
        self._unnamed: dict[int, Process] = {}
        self._searched = 0.0
        self._loads: Mapping[str, Sequence[int]] = {}
        self._loads_read = 0.0
        self.patience = Patience(self.watchdog, options.patience, self._stacks, self._activities)
        self._active: dict[tuple[int, bool], Activity] = {}
        self.nodes = OtherNodes(folder, shared, options.silence)
        self.declared = Declared()

    def run(self, kind: str) -> LaunchRecord:
        """Returns the record of the attempt. After a failure, fetches the other nodes' evidence."""
        record = super().run(kind)
        told = self._told_death or self.seen.stall is not None
        badly = bool(record.deaths or record.launch_error or self._root_code or self.nodes.trouble)
        if told or record.interrupted or not badly:
            return record
        try:
            self._share()
        except KeyboardInterrupt:
            self.seen.interrupted = True
        return self.record(kind)

    def _turn(self) -> bool:
        """A file system that fails for a moment does not end a job: the next turn looks again."""
        with self._losing("a look at the ranks"):
            return super()._turn()
        return self._root_code is not None

    def _share(self) -> None:
        with self._losing("the evidence of other nodes"):
            self.record("watch").write(self.folder)
            self.seen.not_seen += self.nodes.share(self._look)

    def _capture(self, samples: Sequence[RankSample]) -> None:
        with self._losing("the stacks of the ranks"):
            super()._capture(samples)

    @contextmanager
    def _losing(self, evidence: str) -> Iterator[None]:
        """Notes what is missing because a disk is full or fails, which must not end a job."""
        try:
            yield
        except OSError as error:
            lost = f"{evidence} ({error.strerror or error})"
            self.seen.not_seen += [lost] if lost not in self.seen.not_seen else []

    def _stalled(self, now: float, samples: Sequence[RankSample]) -> Stall | None:
        whole = len(samples) == self.nodes.world
        stall = self.patience.observe(now, [*samples, *self.nodes.others], whole)
        stall = self.nodes.agreed(stall, samples)
        return None if stall is not None and stall.early and self._again else stall

    def _blocked(self, ranks: Sequence[int]) -> list[int]:
        return [*super()._blocked(ranks), *self.nodes.blocked]

    def _someone_died(self) -> bool:
        return super()._someone_died() or bool(self.nodes.deaths)

    def _stacks(self, ranks: Sequence[int], native: bool) -> Mapping[int, bytes]:
        # The first read of the symbols of CUDA's libraries takes seconds.
        seconds = NATIVE if native else self.options.capture
        return python_frames(self._of(ranks), seconds, native=native)

    def _activities(self, dumps: Mapping[int, bytes], inside: bool) -> Mapping[int, str]:
        """What each rank has done since the last look, which is forgotten after a while."""
        now, moved = time.monotonic(), network.bytes_by_socket() if inside else None
        found: dict[int, str] = {}
        for rank, process in self._of(dumps).items():
            before = self._active.pop((rank, inside), None)
            after = activity.look(process, now, moved, python_threads(dumps[rank]))
            if after is None:
                continue
            beat = protocol.Heartbeat.read(self.folder / protocol.heartbeat_file(rank))
            after = replace(after, turns=beat.turns if beat else 0)
            self._active[rank, inside] = after
            if before is not None and now - before.at < STALE:
                found[rank] = activity.work(before, after, waits_for_child(dumps[rank]))
        return found

    def _awaited(self, seconds: float) -> str:
        if not self._met():
            return self.declared.awaited(seconds)
        return self.patience.doubt(time.monotonic())

    def _met(self) -> bool:
        """Whether a rank here has met those of other nodes."""
        return any((self.folder / protocol.job_file(rank)).exists() for rank in self.ranks)

    def _tokens(self) -> Mapping[str, Sequence[int]]:
        now = time.monotonic()
        if now - self._loads_read > LOADS_EVERY:
            self._loads, self._loads_read = last_loads(self.folder, self.ranks), now
        return self._loads

    # ------------------------------------------------------------------ which ranks exist

    def _look(self) -> list[RankSample]:
        if self._expected is None or len(self.ranks) < self._expected:
            self._discover()
        for rank, process in list(self.seen.processes.items()):
            if not process.alive:
                self._reclaimed(rank)
        samples = super()._look()
        missing = (self._expected or 0) - len(self.ranks)
        if self._local is None:  # the number of local ranks is unknown
            missing -= self.nodes.spoken_for
        if missing > 0 and time.monotonic() - self._last_found < LATE_RANKS:
            samples.append(RankSample(-1, known=False))
        deaths = [death.rank for death in self.seen.deaths(self.folder)]
        self.nodes.look(samples, self.patience, deaths)
        return samples

    def _discover(self) -> None:
        found = set(self.ranks)
        for path in self.folder.glob("rank-*.pid"):
            number = protocol.natural(path.name.split("-")[1].split(".")[0])
            if number is not None and number not in found and self._find(number):
                found.add(number)
                self._last_found = time.monotonic()
                with suppress(OSError, ValueError):
                    raw = protocol.read_json(path)
                    self._local = raw.get("local_ranks")
                    self._expected = self._local or raw.get("world_size")
                    self.nodes.world = max(self.nodes.world, raw.get("world_size") or 0)
        self._search(set(range(self._expected or 0)) - found)
        self.ranks = sorted(found | set(self._unnamed))

    def _search(self, missing: Set[int]) -> None:
        """Looks for ``missing`` ranks that have not named themselves."""
        now = time.monotonic()
        if not missing or self.nodes.world != self._expected or now - self._last_found > LATE_RANKS:
            return
        if now - self._searched > SEARCH_EVERY:
            self._searched = now
            family = self.running.family.alive().values()
            self._unnamed.update(unnamed(family, self.seen.processes, missing))

    def _find(self, rank: int) -> Process | None:
        if (named := super()._find(rank)) is not None:
            self._unnamed.pop(rank, None)
        return named or self._unnamed.get(rank)

    def _of(self, ranks: Iterable[int]) -> dict[int, Process]:
        ranks = tuple(ranks)
        return {r: self._unnamed[r] for r in ranks if r in self._unnamed} | super()._of(ranks)

    def _reclaimed(self, rank: int) -> None:
        """Looks for a new process of ``rank``: a script may run several programs in sequence."""
        known = self.seen.processes[rank]
        if rank not in self.seen.exits:
            del self.seen.processes[rank]
            if not self._find(rank):
                self.seen.processes[rank] = known

    # ------------------------------------------------------------------ how ranks ended

    def _note_ends(self, samples: Sequence[RankSample]) -> None:
        """Notes how ranks ended if no elastic agent reports it. An end without a trace may be
        normal (``os._exit(0)``) unless the peers hang or the job fails."""
        if self.agent is not None:
            return
        certain = self.seen.stall is not None or self._root_code not in (None, 0)
        for s in samples:
            gone = s.known and not s.alive and s.rank not in self.seen.exits
            pid = self._of([s.rank])[s.rank].pid if gone else self.running.root
            if pid != self.running.root:
                status = traces(self.folder, s, pid)
                if status is not None and (certain or status.signal != UNTOLD):
                    self.seen.exits[s.rank] = status
                    self.seen.ended_at[s.rank] = time.time()

    # ------------------------------------------------------------------ what to do about it

    def _is_over(self) -> bool:
        if self._root_code is None and self._next.is_dir():
            self.again = True
        return self.again or self._ends or super()._is_over()

    def _ends_after_stall(self, samples: Sequence[RankSample]) -> bool:
        self._note_ends(samples)
        self._told_at = _progress(samples)
        self._gone = frozenset(s.rank for s in samples if not s.alive)
        return self._stands() and self._tell_trouble()

    def _stands(self) -> bool:
        """Whether, since the stall was seen, no rank has made progress and none of those that
        others wait for has ended. Stacks take seconds to collect; an abort cannot be taken back."""
        samples, stall = super()._look(), self.seen.stall
        ended = {s.rank for s in samples if not s.alive} - self._gone
        stood = self._told_at is None or self._told_at == _progress(samples)
        return stood and not (stall is not None and ended & {*stall.elsewhere})

    def _tell_interruption(self) -> None:
        """Reports what is known before the job is ended: a scheduler may soon kill moediag. A stall
        or a death that was reported is not reported again."""
        if self._told_death or self.seen.stall is not None or not self.seen.processes:
            return
        samples = self._look()
        self.seen.stall = self.patience.pause(time.monotonic(), [*samples, *self.nodes.others])
        self._capture(samples)
        self._on_trouble(self.record("watch"), self._stands)

    def _died(self, now: float, samples: Sequence[RankSample]) -> bool:
        if self._told_at is not None:
            if self._told_at != _progress(samples):
                self._told_at, self._leaves, self._again = None, False, False
                self.nodes.went_on()
                self._withdraw(now)
            elif not self._again:
                return True  # still the reported stall
        if self._leaves:
            return True
        if not super()._died(now, samples):
            return False
        late = self._first_death is not None and now - self._first_death > AFTER_DEATH
        if self._released and late and not self._told_death:
            self._told_death = True
            self._ends = self._tell_trouble()
        return True

    def _tell_trouble(self) -> bool:
        """Reports the trouble; returns whether to end the job now."""
        self._keep_sources()
        self._share()
        then = self._on_trouble(self.record("watch"), self._stands)
        self._leaves, self._again = then is Then.LEAVE, then is Then.AGAIN
        return then is Then.END

    def _withdraw(self, now: float) -> None:
        """The reported stall has ended by itself."""
        if self.seen.stall is not None:
            quiet = self.patience.quiet(now)
            self.seen.notes.append(slow(self.seen.stall, quiet, self.patience.worked))
        self.seen.stall = None

    def _keep_sources(self) -> None:
        with suppress(OSError, ValueError, TypeError):
            source_files.keep(self.folder, self._of(self.ranks))

    # ------------------------------------------------------------------ the end

    def _graces(self) -> tuple[float, float, float]:
        hangs = self.seen.stall is not None or not self.seen.interrupted
        return shutdown.of_job(self.options.end, (self._asked_by, *self._came), hangs)

    def _end(self) -> None:
        """Ends the job, or only the remaining ranks of a job that ended by itself: its other
        processes (such as a log uploader) may be meant to stay."""
        ours = self.seen.interrupted or self._root_code is None
        left = {rank for rank, process in self.seen.processes.items() if process.alive}
        if self._root_code == 0 and not ours and not left:
            self._withdraw(time.monotonic())
        if self.patience.slowest is not None and not self.seen.notes:
            self.seen.notes.append(slow(*self.patience.slowest))
        gone = {} if self.again or not ours else self._end_processes()
        if not ours and not self.again:
            self._clear()
        waited = time.monotonic() - self._begun
        if self._root_code != 0 and not self._met() and (text := self.declared.never_came(waited)):
            self.seen.not_seen.append(text)
        with self._losing("how the ranks ended"):
            self._note_end(gone, left)
        if not self.again:
            self._account()

    def _note_end(self, gone: Mapping[Process, str], left: Set[int]) -> None:
        """Notes how the ranks ended. ``gone``: processes that moediag ended, by which signal;
        ``left``: ranks that were alive when the end began."""
        self._look()
        self._read_events()
        for rank, process in self.seen.processes.items():
            if rank in self.seen.exits:
                continue
            if process.pid == self.running.root and self._root_code is not None:
                status = status_of(self._root_code)
                by_us = process in gone and status.signal is not None
                self.seen.exits[rank] = replace(status, by_us=by_us)
                self.seen.ended_at[rank] = time.time()
            elif process in gone:
                self.seen.exits[rank] = ExitStatus(signal=gone[process], by_us=True)
        samples = super()._look()
        dumps.keep(self.folder, self.ranks, self.seen.started)
        self._keep_sources()
        self._note_ends(samples)
        if self._root_code == 0:  # their launcher reports success
            # Some launchers (Ray) end ranks that have reported their result by SIGTERM.
            ended = {r for r, s in self.seen.exits.items() if s.by_us and s.signal == "SIGTERM"}
            quiet = [s.rank for s in samples if s.known and s.rank not in self.seen.exits]
            well = (*quiet, *(ended - left))
            self.seen.exits.update(dict.fromkeys(well, ExitStatus(code=0)))

    def _clear(self) -> None:
        """Ends ranks that their launcher left behind."""
        for sig, grace in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            left = [process for process in self.seen.processes.values() if process.alive]
            deadline = time.monotonic() + grace
            for process in left:
                process.send(sig)
                process.send(signal.SIGCONT)  # a stopped process takes no other signal
            while left and time.monotonic() < deadline:
                time.sleep(0.02)
                left = [process for process in left if process.alive]


def _progress(samples: Sequence[RankSample]) -> tuple[tuple[int, int], ...]:
    return tuple((s.rank, s.progress) for s in samples)
