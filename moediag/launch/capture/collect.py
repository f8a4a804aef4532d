"""Collects evidence of stuck ranks before they are ended.

Every source is optional: a missing tool, a refused ptrace or an ended process becomes a line of
``not_seen``. Ranks are read in parallel. The tools for one rank run one after the other, because
only one tracer can attach to a process. One deadline bounds everything.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag import protocol
from moediag.launch.capture import source_files, worker_stacks
from moediag.launch.processes import Process, catches
from moediag.masking import masked
from moediag.records import dataclass

CAPTURE_FOLDER = "capture"
TAIL_LINES = 50
# Functions in which a thread waits for its device, which may itself wait for a collective.
_DEVICE = re.compile(
    r"^(?:cuda|cu|hip)\w*Synchronize|^nccl|_local_scalar_dense_(?:cuda|hip)|stream_synchronize"
)
# C++ that issues or awaits communication.
_COMMUNICATION = re.compile(r"\bgloo::|\bc10d::")
_NO_CALLS = ("/elastic/", "/checkpoint/")  # parts of torch.distributed that work by themselves
_ENGINE = ("torch/autograd/graph.py", "torch/autograd/__init__.py")
ANSWER = 3.0  # seconds for a rank's dump, which may have 20,000 operations
_PIPE_SECONDS = 2.0  # torch's monitor reads its pipe about once a second
_DRIVERS = ("/libcuda.so", "/libamdhip64.so")
LAST_CALL = "destroy_process_group"
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

    def look(self, native: bool) -> None:
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
        native = native and not (in_collective(python) and self._explains(python))
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
        binary = find_tool(command[0])
        if binary is None:
            self.miss(f"{what} ({command[0]} missing)")
            return False
        if self.left <= 0.05:
            self.miss(f"{what} (no time left for {command[0]})")
            return False
        try:
            done = subprocess.run(
                [binary, *command[1:]],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=self.left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.miss(f"{what} ({command[0]} took too long)")
            return False
        except OSError as error:
            self.miss(f"{what} ({command[0]}: {error.strerror})")
            return False
        if done.returncode != 0 or not done.stdout:
            if not self.gone:
                self.miss(f"{what} ({command[0]}: {reason(done.stderr)})")
            return False
        if path.suffix == ".txt":  # it begins with the command of the process
            path.write_text(masked(done.stdout.decode("utf-8", "replace")), encoding="utf-8")
        else:
            path.write_bytes(done.stdout)
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


def capture(
    folder: Path, ranks: Mapping[int, Process], seconds: float, *, native: bool = True
) -> Capture:
    """Collects evidence of the living ``ranks`` for at most about ``seconds``, and the last lines
    of every rank's log, in ``folder/capture/rank-N.*``."""
    begun = time.monotonic()
    into = folder / CAPTURE_FOLDER
    into.mkdir(parents=True, exist_ok=True)
    lookers = [_Looker(r, p, folder, begun + seconds) for r, p in sorted(ranks.items())]
    if lookers:
        with ThreadPoolExecutor(max_workers=len(lookers)) as pool:
            for looker, job in [(x, pool.submit(x.look, native)) for x in lookers]:
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


def blocked_frames(ranks: Mapping[int, Process], seconds: float) -> list[int]:
    """Returns ranks whose stack shows the main thread in communication; none without py-spy. Finds
    waits that the heartbeat does not show."""
    found = python_frames(ranks, seconds)
    return [rank for rank, dump in found.items() if in_collective(dump)]


def python_frames(
    ranks: Mapping[int, Process], seconds: float, *, native: bool = False
) -> dict[int, bytes]:
    """Returns py-spy's JSON of each rank read within ``seconds``; empty without py-spy. A rank
    inside autograd's engine is read with native frames in any case: only these show whether C++
    computes there or waits for a collective."""
    found = {}
    for rank, process in ranks.items():
        dump = _dump(process, seconds, native)
        if not native and dump is not None and in_backward(dump):
            dump = _dump(process, seconds, True) or dump
        if dump is not None:
            found[rank] = dump
    return found


def _dump(process: Process, seconds: float, native: bool) -> bytes | None:
    binary = find_tool("py-spy")
    if binary is None or not process.alive:
        return None
    options = ["--json", *(["--native"] if native else [])]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            [binary, "dump", *options, "-p", str(process.pid)],
            capture_output=True,
            timeout=seconds,
            check=True,
        ).stdout
    return None


def in_collective(dump: bytes, spins: bool = False) -> bool:
    """Whether py-spy's JSON shows the main thread asleep with its innermost frames in
    torch.distributed or, with native frames, in communication that C++ issued. ``spins``: it need
    not be asleep.

    Importing torch.distributed does not count, nor do files of checkpoints, nor the last call of a
    program, nor the rendezvous: with many ranks, the full queue of the store may drop a connection;
    the rank then sleeps for seconds before it retries, and torch bounds that wait.
    """
    thread = _main_of(dump)
    frames = frames_of(thread)
    python = _python(frames)
    names = [str(f.get("filename", "")) for f in python[:6]]
    if (thread.get("active") and not spins) or any("importlib" in name for name in names):
        return False
    if _in_rendezvous(python) or any(f.get("name") == LAST_CALL for f in python[:6]):
        return False
    if any("torch/distributed/" in n and not any(x in n for x in _NO_CALLS) for n in names):
        return True
    native = frames[: frames.index(python[0])] if python else []
    return any(_COMMUNICATION.search(str(f.get("name", ""))) for f in native)


def joins(dump: bytes) -> bool:
    """Whether py-spy's JSON shows the main thread asleep in ``init_process_group``."""
    thread = _main_of(dump)
    return not thread.get("active") and _in_rendezvous(_python(frames_of(thread)))


def _in_rendezvous(frames: Sequence[Mapping[str, object]]) -> bool:
    return any(frame.get("name") == "init_process_group" for frame in frames[:6])


def _python(frames: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [f for f in frames if str(f.get("filename", "")).endswith((".py", ">"))]


def in_backward(dump: bytes) -> bool:
    """Whether the main thread's innermost frame in py-spy's JSON is that of autograd's engine."""
    frames = main_frames(dump)
    return bool(frames) and str(frames[0].get("filename", "")).endswith(_ENGINE)


def on_device(dump: bytes) -> bool:
    """Whether py-spy's JSON, with native frames, shows the main thread waiting for an accelerator
    or in an NCCL call that does not return; in a backward, one of autograd's threads, which run
    the hooks of a model on a GPU."""
    main = _main_of(dump)
    looked = [frames_of(main)]
    python = _python(looked[0])
    if python and str(python[0].get("filename", "")).endswith(_ENGINE):
        others = [frames_of(thread) for thread in threads(dump) if thread != main]
        looked += [frames for frames in others if not _spawned(_python(frames))]
    return any(_DEVICE.search(str(f.get("name", ""))) for frames in looked for f in frames)


def _spawned(python: Sequence[Mapping[str, object]]) -> bool:
    """Whether the program started the thread."""
    return bool(python) and str(python[-1].get("name", "")).endswith("_bootstrap")


def main_frames(dump: bytes) -> list[dict[str, object]]:
    """Returns the main thread's frames in py-spy's JSON, innermost first; empty if none."""
    return frames_of(_main_of(dump))


def frames_of(thread: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the frames of a thread in py-spy's JSON, innermost first; empty if none."""
    frames = thread.get("frames", [])
    return [f for f in frames if isinstance(f, dict)] if isinstance(frames, list) else []


def _main_of(dump: bytes) -> dict[str, Any]:
    """Returns the main thread by name, else by id: without ``threading`` there are no names. Empty
    if ``dump`` is not py-spy's JSON."""
    found = threads(dump)
    named = (t for t in found if t.get("thread_name") == "MainThread")
    first = (t for t in found if t.get("os_thread_id") and t["os_thread_id"] == t.get("pid"))
    return next(named, None) or next(first, {})


def threads(dump: bytes) -> list[dict[str, Any]]:
    """Returns the threads in py-spy's JSON; empty if it is something else."""
    with suppress(ValueError, TypeError):
        return [thread for thread in protocol.parse_json(dump) if isinstance(thread, dict)]
    return []


def find_tool(name: str) -> str | None:
    """Finds a tool, first beside this interpreter: a virtual environment may not be on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def reason(stderr: bytes) -> str:
    """Returns the reason for a tool's failure in one line."""
    text = stderr.decode(errors="replace").strip()
    lowered = text.lower()
    if "permission denied" in lowered or "operation not permitted" in lowered:
        return "ptrace refused"
    return text.splitlines()[-1][:200] if text else "no output"


def _tail(path: Path) -> str:
    """Returns the last TAIL_LINES lines, reading at most 64 KiB."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:]) + "\n"
