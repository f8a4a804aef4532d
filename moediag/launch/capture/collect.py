"""Collects evidence of stuck ranks before they are ended.

Every source is optional: a missing tool, a refused ptrace or an ended process becomes a line of
``not_seen``. Ranks are read in parallel. The tools for one rank run one after the other, because
only one tracer can attach to a process. One deadline bounds everything.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from moediag import protocol
from moediag.launch.capture import py_spy, source_files, worker_stacks
from moediag.launch.capture.py_spy import in_collective, main_frames, threads
from moediag.launch.processes import Process, catches
from moediag.masking import masked
from moediag.records import dataclass

CAPTURE_FOLDER = "capture"
TAIL_LINES = 50
ANSWER = 3.0  # seconds for a rank's dump, which may have 20,000 operations
_PIPE_SECONDS = 2.0  # torch's monitor reads its pipe about once a second
_DRIVERS = ("/libcuda.so", "/libamdhip64.so")
_PROC_FILES = ("status", "wchan", "stat", "stack")


@dataclass(frozen=True, slots=True)
class Capture:
    """The duration of a capture and what it missed."""

    seconds: float
    not_seen: tuple[str, ...] = ()


@dataclass
class _Looker:
    """Collects one rank's files into ``folder/capture``."""

    rank: int
    process: Process
    folder: Path
    deadline: float  # time.monotonic()
    not_seen: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def miss(self, what: str) -> None:
        self.not_seen.append(f"rank {self.rank}: {what}")

    def look(self) -> None:
        into = self.folder / CAPTURE_FOLDER
        name, pid = f"rank-{self.rank}", str(self.process.pid)
        self._proc(into / f"{name}.proc.txt")
        self._request_flight()
        seen_stat = self.process.stat()
        dump = ["py-spy", "dump", "-p", pid]
        if seen_stat is not None and seen_stat.state == "T":
            dump.append("--nonblocking")  # py-spy cannot stop a stopped process
        seen = self._tool(into / f"{name}.pyspy.json", "Python frames by py-spy", [*dump, "--json"])
        if not seen and not self.gone and not self._ask_faulthandler():
            self.miss("Python stack (faulthandler cannot be asked either)")
        python = (into / f"{name}.pyspy.json").read_bytes() if seen else b""
        self._look_at_workers(into, python)
        native = not (in_collective(python) and self._explains(python))
        if native and seen:
            names = [*dump, "--native", "--full-filenames"]
            native = not self._tool(into / f"{name}.native.txt", "native frames", names)
        if native:  # pystack takes three times as long
            names = ["pystack", "remote", "--no-color", "--native", pid]
            self._tool(into / f"{name}.pystack.txt", "native frames by pystack", names)
        self._await_flight()
        if self.gone:
            self.miss("whatever was not read before it ended by itself, during the capture")

    def _explains(self, dump: bytes) -> bool:
        """Whether Python's frames of a rank in a collective are all that its wait needs. Native
        ones, which take seconds for several ranks, show more if it waits for a device or holds the
        interpreter lock."""
        try:
            maps = Path(f"/proc/{self.process.pid}/maps").read_text(errors="replace")
        except OSError:
            return False
        held = any(thread.get("owns_gil") for thread in threads(dump))
        return not held and not any(driver in maps for driver in _DRIVERS)

    def _look_at_workers(self, into: Path, dump: bytes) -> None:
        main = main_frames(dump)
        if worker_stacks.waits_for_data(main) or worker_stacks.waits_for_children(main):
            for pid in worker_stacks.children(self.process.pid):
                what = f"stack of its child process {pid}"
                path = worker_stacks.file_of(into, self.rank, pid)
                self._tool(path, what, ["py-spy", "dump", "-p", str(pid), "--json"])

    @property
    def gone(self) -> bool:
        return not self.process.alive

    def _proc(self, path: Path) -> None:
        parts = []
        for name in _PROC_FILES:
            try:
                text = Path(f"/proc/{self.process.pid}/{name}").read_text(errors="replace").rstrip()
            except OSError as error:
                text = f"(not readable: {error.strerror})"
            parts.append(f"== {name}\n{text}\n")
        path.write_text("".join(parts), encoding="utf-8")

    def _ask_faulthandler(self) -> bool:
        """Sends SIGUSR1, on which the rank writes its stacks to a file. This needs no privilege but
        may wake a rank stuck in a system call, so it is a fallback. Only sent to a process that
        catches it, because others would die."""
        if self.gone or not catches(self.process.pid, signal.SIGUSR1):
            return False
        self.process.send(signal.SIGUSR1)
        return True

    def _tool(self, path: Path, what: str, command: list[str]) -> bool:
        if self.gone:
            return False
        if self.left <= 0.05:
            self.miss(f"{what} (no time left for {command[0]})")
            return False
        done = py_spy.run(command, self.left)
        if done.lost:
            if not self.gone:
                named = done.lost.startswith(command[0])
                self.miss(f"{what} ({'' if named else f'{command[0]}: '}{done.lost})")
            return False
        if path.suffix == ".txt":  # it begins with the command of the process
            path.write_text(masked(done.json.decode("utf-8", "replace")), encoding="utf-8")
        else:
            path.write_bytes(done.json)
        return True

    def _request_flight(self) -> None:
        if (self.folder / protocol.heartbeat_file(self.rank)).exists():
            with suppress(OSError):
                (self.folder / protocol.dump_request_file(self.rank)).touch()

    def _await_flight(self) -> None:
        """Waits for the recorder's thread, which answers in milliseconds unless the GIL is held."""
        if not (self.folder / protocol.heartbeat_file(self.rank)).exists():
            self.miss("Flight Recorder (no recorder in this rank)")
            return
        target = self.folder / protocol.flight_file(self.rank)
        give_up = time.monotonic() + min(self.left + 0.2, ANSWER)
        while not target.exists():
            if self.gone:
                return
            if time.monotonic() > give_up:
                if not self._by_pipe():
                    self.miss("Flight Recorder (the rank did not answer)")
                return
            time.sleep(0.01)

    def _by_pipe(self) -> bool:
        """Asks torch's NCCL monitor, which answers even if the GIL is held."""
        pipe = self.folder / f"{protocol.WATCHDOG_PIPES}{self.rank}.pipe"
        target = self.folder / protocol.watchdog_dump(self.rank)
        try:
            if not stat.S_ISFIFO(pipe.stat().st_mode):
                return False
            wire = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails without a reader
            try:
                os.write(wire, b"1\n")
            finally:
                os.close(wire)
        except OSError:
            return False
        size, until = -1, time.monotonic() + _PIPE_SECONDS
        while time.monotonic() < until:
            before, size = size, target.stat().st_size if target.exists() else -1
            if size > 0 and size == before:
                return True
            time.sleep(0.1)
        return size > 0


def capture(folder: Path, ranks: Mapping[int, Process], seconds: float) -> Capture:
    """Collects evidence of the living ``ranks`` for at most about ``seconds``, and the last lines
    of every rank's log, in ``folder/capture/rank-N.*``."""
    begun = time.monotonic()
    into = folder / CAPTURE_FOLDER
    into.mkdir(parents=True, exist_ok=True)
    lookers = [_Looker(r, p, folder, begun + seconds) for r, p in sorted(ranks.items())]
    if lookers:
        with ThreadPoolExecutor(max_workers=len(lookers)) as pool:
            for looker, job in [(x, pool.submit(x.look)) for x in lookers]:
                try:
                    job.result()
                except OSError as error:
                    looker.miss(f"capture ({error})")
    with suppress(OSError, ValueError, TypeError):
        source_files.keep(folder, ranks)
    for log in folder.glob("rank-*.log"):
        with suppress(OSError):
            (into / f"{log.stem}.tail.txt").write_text(_tail(log), encoding="utf-8")
    missing = tuple(dict.fromkeys(line for x in lookers for line in x.not_seen))
    return Capture(time.monotonic() - begun, missing)


def _tail(path: Path) -> str:
    """Returns the last TAIL_LINES lines, reading at most 64 KiB."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:]) + "\n"
