"""Follows a launched trial to its end: progress, deaths, hang, timeout, Ctrl-C. Evidence is
collected before the ranks are ended."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from moediag import protocol
from moediag.errors import LaunchError
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import ExitStatus, Stall
from moediag.evidence.signal_names import name_of, status_of
from moediag.launch import shutdown, signals
from moediag.launch.base import Running, json_lines, last_words
from moediag.launch.capture import machine
from moediag.launch.capture.collect import capture
from moediag.launch.capture.py_spy import blocked_frames, on_device, python_frames
from moediag.launch.follow.seen import Seen
from moediag.launch.follow.watchdog import Watchdog
from moediag.launch.processes import NEVER, Process, oom_kills
from moediag.launch.rank_sample import RankSample, states
from moediag.launch.settings import LaunchOptions, OnProgress, Progress

PROGRESS_EVERY = 0.1  # seconds
NATIVE = 20.0  # seconds for the native frames of one rank that has CUDA's libraries
MACHINE = 5.0  # seconds for queries of GPUs and communicators
LEAVE = 5.0  # seconds that a failed rank may take to end: torch's teardown on a busy box


class Supervisor:
    """Follows one trial; subclasses follow trials on several nodes and watched jobs."""

    launcher = "the launcher"  # its name in errors

    def __init__(
        self,
        running: Running,
        trial: protocol.Trial,
        folder: Path,
        ranks: int,
        options: LaunchOptions,
        on_progress: OnProgress | None,
    ) -> None:
        self.running = running
        self.folder = folder
        self.options = options
        self.timeout = trial.timeout
        first = (options.node_rank or 0) * ranks if options.nnodes > 1 else 0
        self.ranks: Sequence[int] = range(first, first + ranks)
        self.single = trial.alone
        self.seen = Seen(started=time.time())
        self._killed_before = oom_kills()
        self._gpu = trial.on_gpu
        self.backend = trial.backend
        spinning = self._on_device if trial.on_gpu else None
        self.watchdog = Watchdog(options.quiescence, self.seen.started, self._blocked, spinning)
        self._on_progress = on_progress
        self._told = 0.0
        self._begun = time.monotonic()
        self._released = False
        self._first_death: float | None = None
        self._root_code: int | None = None
        self.agent: int | None = None  # pid of an elastic agent that named itself
        self._end_begun: float | None = None
        self._asked_by: int = signal.SIGINT  # the signal that interrupted moediag
        self._came: Sequence[int] = ()  # signals to moediag during the end

    def run(self, kind: str) -> LaunchRecord:
        try:
            self._follow()
        except LaunchError as error:
            self.seen.launch_error = error.message
        except KeyboardInterrupt as error:
            self.seen.interrupted = True
            self._asked_by = signals.of_interrupt(error)
        finally:
            with signals.held() as came:
                self._came = came
                try:
                    if self.seen.interrupted:
                        self._tell_interruption()
                finally:
                    self._end()
            self.seen.interrupted |= bool(came)
        return self.record(kind)

    def record(self, kind: str) -> LaunchRecord:
        """The record so far."""
        seen = self.seen
        return LaunchRecord(
            started=seen.started,
            ended=time.time(),
            launcher=kind,
            first_progress=seen.first_progress,
            exits=dict(sorted(seen.exits.items())),
            deaths=seen.deaths(self.folder),
            stall=seen.stall,
            timed_out=seen.timed_out,
            interrupted=seen.interrupted,
            launch_error=seen.launch_error,
            capture_seconds=seen.capture_seconds,
            not_seen=tuple(dict.fromkeys(seen.not_seen)),
            pids={rank: process.pid for rank, process in sorted(seen.processes.items())},
            notes=tuple(seen.notes),
            oom_kills=self._oom_kills(),
        )

    def _oom_kills(self) -> int | None:
        now = oom_kills()
        known = now is not None and self._killed_before is not None
        return now - self._killed_before if known else None  # type: ignore[operator]

    def _follow(self) -> None:
        """Returns when the trial has ended or must be ended."""
        while not self._turn():
            time.sleep(self.options.poll)

    def _turn(self) -> bool:
        """Looks at the ranks once; returns whether the trial has ended or must be ended."""
        if self.options.stopped:
            raise KeyboardInterrupt
        self._root_code = self.running.poll()
        samples = self._look()
        self._read_events()
        self._note_ends(samples)
        if self._is_over():
            return True
        self._tell("running" if self.seen.processes else "launching", samples)
        now = time.monotonic()
        if self._died(now, samples):
            pass
        elif stall := self._stalled(now, samples):
            self.seen.stall = stall
            self._capture(samples)
            if self._ends_after_stall(samples):
                return True
        if now - self._begun > self.timeout:
            self.seen.timed_out = True
            self._capture(samples)
            self._ends_after_stall(samples)
            return True
        return False

    def _graces(self) -> tuple[float, float, float]:
        return self.options.graces

    def _stalled(self, now: float, samples: Sequence[RankSample]) -> Stall | None:
        return self.watchdog.observe(now, samples)

    def _is_over(self) -> bool:
        return self._root_code is not None

    def _tell_interruption(self) -> None:
        """A hook: reports what is known, before the ranks are ended."""

    def _note_ends(self, samples: Sequence[RankSample]) -> None:
        """A hook for launchers that do not report how ranks end."""

    def _ends_after_stall(self, samples: Sequence[RankSample]) -> bool:  # noqa: ARG002
        """Called once the evidence of a stall is on disk. Returns whether to end the ranks now."""
        return True

    def _someone_died(self) -> bool:
        return any(s.code != 0 for s in self.seen.exits.values())

    def _died(self, now: float, samples: Sequence[RankSample]) -> bool:
        """Returns whether a rank failed. After the first failure, gives the peers a moment to fail
        by themselves, captures the living ones, then lets the agent end them."""
        if not self._someone_died():
            return False
        if self._first_death is None:
            self._first_death = now
        after = now - self._first_death
        alive = [s for s in samples if s.alive and s.rank not in self.seen.exits]
        # A rank that wrote its error file is ending by itself; its own exit status is kept.
        leaving = [s for s in alive if (self.folder / protocol.error_file(s.rank)).exists()]
        staying = [s for s in alive if s not in leaving]
        if (staying and after < self.options.settle) or (leaving and after < LEAVE):
            return True
        if not self._released:
            if staying:
                self._capture(staying)
            with suppress(OSError):  # the agent continues by itself a little later
                (self.folder / protocol.RELEASE_FILE).touch()
            self._released = True
        return True

    def _look(self) -> list[RankSample]:
        samples = []
        for rank in self.ranks:
            process = self.seen.processes.get(rank) or self._find(rank)
            beat = protocol.Heartbeat.read(self.folder / protocol.heartbeat_file(rank))
            stat = process.stat() if process is not None else None
            alive = process is None or (stat is not None and stat.alive)
            if beat is not None and self.seen.first_progress is None:
                self.seen.first_progress = beat.time or time.time()
            samples.append(
                RankSample(
                    rank,
                    known=process is not None,
                    alive=alive,
                    state=beat.state if beat else "starting",
                    progress=beat.progress if beat else -1,
                    step=beat.step if beat else 0,
                    begun=beat is not None and (beat.turns > 0 or beat.step > 1),
                    time=beat.time if beat else 0.0,
                    cpu=stat.cpu if stat else 0.0,
                    runnable=stat is not None and stat.state in "RD",
                    stopped=stat is not None and stat.state == "T",
                )
            )
        return samples

    def _find(self, rank: int) -> Process | None:
        """Returns the process of ``rank`` from its pid file. Ignores ranks of other machines: nodes
        may share the folder."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = protocol.read_json(self.folder / protocol.pid_file(rank))
            if raw["host"] == socket.gethostname() and raw["time"] >= self.seen.started - 60:
                started = raw.get("started")
                self.seen.processes[rank] = Process(
                    int(raw["pid"]), started if isinstance(started, int) else NEVER
                )
                return self.seen.processes[rank]
        return None

    def _of(self, ranks: Iterable[int]) -> dict[int, Process]:
        return {r: self.seen.processes[r] for r in ranks if r in self.seen.processes}

    def _blocked(self, ranks: Sequence[int]) -> list[int]:
        return blocked_frames(self._of(ranks), self.options.capture)

    def _on_device(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks whose native frames show the main thread waiting for the GPU."""
        found = python_frames(self._of(ranks), NATIVE, native=True)
        return [rank for rank, dump in found.items() if on_device(dump)]

    def _capture(self, samples: Sequence[RankSample]) -> None:
        self._tell("capturing", samples, force=True)
        processes = self._of(s.rank for s in samples if s.alive and s.known)
        short = self.options.capture
        seconds = max(short, NATIVE) if self._gpu else short
        with ThreadPoolExecutor(max_workers=1) as pool:
            # A scheduler waits for the end of an interrupted job.
            most = min(short, MACHINE) if self.seen.interrupted else MACHINE
            beside = pool.submit(self._ask_machine, processes, most)
            done = capture(self.folder, processes, seconds)
            of_machine = beside.result()
        self.seen.capture_seconds = (self.seen.capture_seconds or 0.0) + done.seconds
        self.seen.not_seen += [*done.not_seen, *of_machine]

    def _ask_machine(self, processes: Mapping[int, Process], seconds: float) -> tuple[str, ...]:
        """Queries GPUs and communicators if the ranks may use any."""
        if not self._gpu and self.backend:
            return ()
        return machine.look(self.folder, processes, seconds, self.backend)

    def _read_events(self) -> None:
        """Reads the agent's reports. Ranks that end by a signal after the shutdown began were ended
        by moediag."""
        try:
            text = (self.folder / protocol.AGENT_EVENTS).read_text(encoding="utf-8")
        except OSError:
            return
        for event in json_lines(text):
            if event.get("e") == "not_seen":
                self.seen.not_seen.append(str(event["text"]))
            if event.get("e") == "agent":
                self.agent = int(str(event["pid"]))
            if event.get("e") != "exit":
                continue
            rank, code, name = event["rank"], event["code"], event["signal"]
            at = event["t"]
            if not isinstance(rank, int) or not isinstance(at, float) or rank in self.seen.exits:
                continue
            late = self._end_begun is not None and at >= self._end_begun
            self.seen.exits[rank] = ExitStatus(
                code=code if isinstance(code, int) else None,
                signal=str(name) if name else None,
                by_us=bool(event["by_us"]) or (late and bool(name)),
            )
            self.seen.ended_at[rank] = at

    def _end(self) -> None:
        """Ends the remaining processes, then records how every rank ended."""
        gone = self._end_processes()
        for rank, process in self.seen.processes.items():
            if rank not in self.seen.exits:
                # The agent did not report its end, so it ended together with the agent.
                self.seen.exits[rank] = ExitStatus(signal=gone.get(process, "SIGKILL"), by_us=True)
        self._account()

    def _account(self) -> None:
        ours = self.seen.timed_out or self.seen.stall or self.seen.interrupted
        if not ours and not self.seen.launch_error:
            self.seen.launch_error = self._launch_error()

    def _end_processes(self) -> Mapping[Process, str]:
        """Ends the launch; returns the signal that ended each process."""
        self._tell("ending", (), force=True)
        self._end_begun = time.time()
        gone, stuck = shutdown.end(self.running.family, self._graces(), self._came)
        if stuck:
            self.seen.not_seen.append(f"end of processes {stuck}: they survived SIGKILL")
        deadline = time.monotonic() + 2.0
        while self._root_code is None and time.monotonic() < deadline:
            try:
                self._root_code = self.running.poll()
            except LaunchError:
                break
            time.sleep(0.005 if self._root_code is None else 0)
        self._look()
        self._read_events()
        if self.single and self._root_code is not None and not gone:
            self.seen.exits[0] = status_of(self._root_code)
            self.seen.ended_at[0] = self._end_begun
        return gone

    def _launch_error(self) -> str:
        """Returns why the launch failed; "" if the ends of the ranks explain it."""
        code = self._root_code
        explained = any(not s.by_us and s.code != 0 for s in self.seen.exits.values())
        if code in (0, None) or explained:
            return ""
        assert code is not None
        log = last_words(self.folder / protocol.LAUNCHER_LOG, 15)
        what = f"signal {name_of(-code)}" if code < 0 else f"exit code {code}"
        return f"{self.launcher} ended with {what}, no rank had failed:\n{log}".rstrip().rstrip(":")

    def _tell(self, doing: str, samples: Sequence[RankSample], force: bool = False) -> None:
        now = time.monotonic()
        if self._on_progress is None or (not force and now - self._told < PROGRESS_EVERY):
            return
        self._told = now
        steps = {s.rank: s.step for s in samples}
        events = {s.rank: s.progress for s in samples}
        pids = {rank: process.pid for rank, process in self.seen.processes.items()}
        at = now - self._begun
        tokens = self._tokens()
        awaited = self._awaited(at)
        self._on_progress(
            Progress(doing, states(samples), steps, at, events, pids, tokens, awaited)
        )

    def _awaited(self, seconds: float) -> str:  # noqa: ARG002
        return ""

    def _tokens(self) -> Mapping[str, Sequence[int]]:
        return {}
