"""Runs py-spy on processes, and reads from its JSON what their main threads do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moediag.evidence.rank_stacks import BUFFERS
from moediag.launch.processes import Process
from moediag.protocol import parse_json
from moediag.records import dataclass

# Functions in which a thread waits for its device, which may itself wait for a collective.
_DEVICE = re.compile(
    r"^(?:cuda|cu|hip)\w*(?:Synchronize|MemcpyDtoH)|^nccl|stream_synchronize"
    r"|_local_scalar_dense_(?:cuda|hip)"
)
_LAUNCH = re.compile(r"^(?:cu|cuda|hip)(?:Module)?LaunchKernel")
# C++ that issues or awaits communication.
_COMMUNICATION = re.compile(r"\bgloo::|\bc10d::")
_NO_CALLS = ("/elastic/", "/checkpoint/")  # parts of torch.distributed that work by themselves
_ENGINE = ("torch/autograd/graph.py", "torch/autograd/__init__.py")
LAST_CALL = "destroy_process_group"


@dataclass(frozen=True, slots=True)
class Dump:
    """What a tool printed, or why it printed nothing."""

    json: bytes = b""
    """Of a tool that was not asked for JSON: its text."""
    lost: str = ""


def run(command: Sequence[str], seconds: float) -> Dump:
    """Runs a tool that looks at a process."""
    tool = find_tool(command[0])
    if tool is None:
        return Dump(lost=f"{command[0]} missing")
    try:
        done = subprocess.run(
            [tool, *command[1:]], capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Dump(lost=f"{command[0]} took too long")
    except OSError as error:
        return Dump(lost=f"{command[0]}: {error.strerror}")
    if done.returncode != 0 or not done.stdout:
        return Dump(lost=reason(done.stderr))
    return Dump(done.stdout)


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
    options = ["--json", *(["--native"] if native else [])]
    made = run(["py-spy", "dump", *options, "-p", str(process.pid)], seconds)
    return made.json or None


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
    if _in_rendezvous(python) or in_last_call(dump):
        return False
    if python and str(python[0].get("name", "")).endswith(BUFFERS):
        return True
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


def in_last_call(dump: bytes) -> bool:
    """Whether py-spy's JSON shows the main thread in ``destroy_process_group``."""
    return any(f.get("name") == LAST_CALL for f in _python(main_frames(dump))[:6])


def in_backward(dump: bytes) -> bool:
    """Whether the main thread's innermost frame in py-spy's JSON is that of autograd's engine."""
    frames = main_frames(dump)
    return bool(frames) and str(frames[0].get("filename", "")).endswith(_ENGINE)


def on_device(dump: bytes) -> bool:
    """Whether py-spy's JSON, with native frames, shows the main thread waiting for an accelerator
    or in an NCCL call that does not return; in a backward, one of autograd's threads, which run
    the hooks of a model on a GPU."""
    return any(_DEVICE.search(str(f.get("name", ""))) for frames in _issuing(dump) for f in frames)


def launch(dump: bytes) -> tuple[tuple[str, int], ...]:
    """Returns what called the launch of a kernel in which py-spy's JSON, with native frames, shows
    such a thread: names and lines, innermost first; () without one. A launch returns at once unless
    too many wait, or the driver loads the kernel's code, which it cannot while the device is busy.
    """
    for frames in _issuing(dump):
        names = [str(f.get("name", "")) for f in frames]
        inside = [i for i, name in enumerate(names) if _LAUNCH.search(name)]
        if inside:
            lines = [f.get("line") for f in frames]
            callers = zip(names, lines, strict=True)
            return tuple((n, at if isinstance(at, int) else 0) for n, at in callers)[inside[-1] :]
    return ()


def _issuing(dump: bytes) -> list[list[dict[str, Any]]]:
    """The frames of the main thread; in a backward also of the threads that no Python started."""
    main = _main_of(dump)
    looked = [frames_of(main)]
    python = _python(looked[0])
    if python and str(python[0].get("filename", "")).endswith(_ENGINE):
        for thread in threads(dump):
            python = _python(frames_of(thread))
            started = python and str(python[-1].get("name", "")).endswith("_bootstrap")
            looked += [] if started or thread == main else [frames_of(thread)]
    return looked


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


def python_threads(dump: bytes) -> list[int]:
    """Returns the numbers of the threads in py-spy's JSON."""
    return [thread["os_thread_id"] for thread in threads(dump) if thread.get("os_thread_id")]


def threads(dump: bytes) -> list[dict[str, Any]]:
    """Returns the threads in py-spy's JSON; empty if it is something else."""
    with suppress(ValueError, TypeError):
        return [thread for thread in parse_json(dump) if isinstance(thread, dict)]
    return []
