"""What answers in a running job without being loaded into it: torch's Flight Recorder, through the
pipe that the job itself opened, or as a file that its watchdog wrote; torch's debug server; and
NCCL's RAS.

Each has a timeout, and what does not answer is a line of what was not seen.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moediag.launch.attach import debug_server
from moediag.launch.attach.looking import Target
from moediag.launch.attach.proc import Proc
from moediag.launch.capture import machine
from moediag.launch.processes import Process

PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_PIPE_FILE")
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's
_ANSWER = 4.0  # seconds: torch's monitor reads its pipe about once a second
_RAS = 3.0  # seconds
_MOST_BYTES = 256 << 20


def ask(folder: Path, capture: Path, targets: Sequence[Target], proc: Proc) -> list[str]:
    """Writes into ``capture`` what the ranks' own tools answer; returns what is missing. Nothing is
    missing in a job without NCCL, whose tools these are."""
    nccl = [t for t in targets if proc.maps(t.process.pid, b"/libnccl", b"_nccl")
            and proc.maps(t.process.pid, b"/dev/nvidia")]  # fmt: skip
    asked = [t for t in targets if t in nccl or _prefix(proc, t, PIPES)]
    lost = []
    if asked:
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            lost = [text for text in pool.map(lambda t: _flight(proc, t, capture), asked) if text]
    lost += debug_server.ask(capture, [target.process.pid for target in targets], proc)
    if nccl:
        processes: Mapping[int, Process] = {t.rank: t.process for t in nccl}
        lost += machine.look(folder, processes, _RAS, "nccl")
    return lost


def _prefix(proc: Proc, target: Target, names: Sequence[str], default: str = "") -> str:
    own = proc.environment(target.process.pid)
    return next((own[name] for name in names if own.get(name)), default)


def _flight(proc: Proc, target: Target, capture: Path) -> str:
    """Copies the rank's dump, asked for where a pipe takes requests; returns why there is none."""
    pid, rank = target.process.pid, target.rank
    root = proc.root / str(pid) / "root"  # the job may run in a container
    dump = Path(f"{root}{_prefix(proc, target, DUMPS, _DEFAULT)}{rank}")
    pipe = _prefix(proc, target, PIPES)
    before = _written(dump)
    answered = bool(pipe) and _request(Path(f"{root}{pipe}{rank}.pipe"))
    if answered:
        _await(dump, before)
    written = _written(dump)
    if written is None or (not answered and written[0] < target.process.epoch):
        asked = "the rank did not answer" if pipe else f"this job was started without {PIPES[0]}"
        return f"rank {rank}: Flight Recorder ({asked})"
    if written[1] > _MOST_BYTES:
        return f"rank {rank}: Flight Recorder (its dump is larger than 256 MiB)"
    try:
        shutil.copyfile(dump, capture / f"rank-{rank}.flight")
    except OSError as error:
        return f"rank {rank}: Flight Recorder ({error.strerror})"
    return ""


def _written(path: Path) -> tuple[float, int] | None:
    """When the file was written, and its size; None without a regular file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _request(pipe: Path) -> bool:
    """Asks torch's monitor thread for a dump; False if nobody reads the pipe."""
    try:
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return False
        wire = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails without a reader
    except OSError:
        return False
    try:
        os.write(wire, b"1\n")
    except OSError:
        return False
    finally:
        os.close(wire)
    return True


def _await(dump: Path, before: tuple[float, int] | None) -> None:
    """Waits until the file has changed and grows no more."""
    until, last = time.monotonic() + _ANSWER, before
    while time.monotonic() < until:
        time.sleep(0.1)
        now = _written(dump)
        if now is not None and now != before and now == last:
            return
        last = now
