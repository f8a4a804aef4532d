"""Python and native stacks from the output of py-spy, pystack and faulthandler.

Every parser takes text and returns threads with the innermost frame first. Text that it does not
understand gives fewer threads, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moediag.evidence.model import Frame, Stack, Worker
from moediag.protocol import in_libraries, read_stored

# `Traceback for thread 25 (python) [Has the GIL] (most recent call last):`
_PYSTACK_THREAD = re.compile(r"^\s*Traceback for thread (?P<id>\d+)(?: \((?P<name>[^)]*)\))?")
_PYSTACK_FRAME = re.compile(
    r'^\s*\((?P<kind>Python|C)\) File "(?P<file>[^"]*)", line (?P<line>-?\d{1,9}|\?*), '
    r"in (?P<function>.*?)(?P<library>(?: \(inlined\))? \((?:/[^()]*|[^()]*\.so[^()]*)\))?$"
)
LAST_CALL = "destroy_process_group"
# `Thread 25 (idle): "MainThread"` and `    main (/tmp/s.py:4)` of py-spy's text.
_SPY_THREAD = re.compile(r'^Thread (?P<id>\S+) \([^)]*\)(?:: "(?P<name>.*)")?$')
_SPY_FRAME = re.compile(r"^ {4}(?P<function>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d{1,9}))?\)$")
# Packages and modules that py-spy names without their folder.
_PACKAGES = frozenset((
    "accelerate", "asyncio", "concurrent", "contextlib.py", "datasets", "deepspeed", "importlib",
    "lightning", "lightning_fabric", "megatron", "multiprocessing", "peft", "pytorch_lightning",
    "queue.py", "ray", "runpy.py", "selectors.py", "socket.py", "subprocess.py", "threading.py",
    "torch", "torchdata", "torchvision", "tqdm", "transformers", "trl", "verl", "vllm", "wandb",
))  # fmt: skip
# `Current thread 0x00007f31 [MainThread] (most recent call first):`
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) (?P<id>0x[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? ?"
    r"\(most recent call first\):"
)
_FAULT_FRAME = re.compile(
    r'^  File "(?P<file>[^"]*)", line (?P<line>\d{1,9}|\?+),? in (?P<function>.*?)$'
)


def parse_pyspy(text: str) -> tuple[Stack, ...]:
    """``py-spy dump --json`` (with or without ``--native``)."""
    try:
        threads = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return pyspy(threads if isinstance(threads, list) else [])


def is_pyspy(threads: list[Any]) -> bool:
    """Whether parsed JSON is py-spy's: a list of threads, each with frames."""
    return bool(threads) and all(isinstance(t, dict) and "frames" in t for t in threads[:8])


def pyspy(threads: list[Any]) -> tuple[Stack, ...]:
    """The same from parsed JSON."""
    stacks = []
    for thread in threads:
        if not isinstance(thread, dict) or not isinstance(thread.get("frames"), list):
            continue
        name = _text(thread.get("thread_name") or thread.get("os_thread_id"))
        frames = tuple(_pyspy_frame(f) for f in thread["frames"] if isinstance(f, dict))
        gil, active = bool(thread.get("owns_gil")), bool(thread.get("active"))
        stacks.append(Stack(name, "py-spy", frames, gil, active))
    return tuple(stacks)


_WORKER_LOOP = "torch/utils/data/_utils/worker.py"


def read_workers(capture: Path, rank: int) -> tuple[Worker, ...]:
    """The worker processes of a rank's data loader, by pid: the children of the rank, as py-spy saw
    them (:mod:`moediag.launch.capture.worker_stacks`), whose stack shows torch's worker loop."""
    found = []
    for path in capture.glob(f"rank-{rank}.worker-*.json"):
        name = re.fullmatch(r"rank-\d+\.worker-(\d+)\.json", path.name)
        try:
            stacks = parse_pyspy(read_stored(path).decode("utf-8", "replace"))
        except OSError:
            continue
        frames = [frame for stack in stacks for frame in stack.frames]
        if name is not None and any(frame.file.endswith(_WORKER_LOOP) for frame in frames):
            found.append(Worker(int(name[1]), stacks))
    return tuple(sorted(found, key=lambda worker: worker.pid))


def _pyspy_frame(raw: dict[str, Any]) -> Frame:
    file = _text(raw.get("filename"))
    line = raw.get("line")
    # py-spy names the shared library in `module` for native frames, and only for these.
    native = bool(raw.get("module")) or not (file.endswith(".py") or file.startswith("<"))
    return Frame(
        file=file or _text(raw.get("module")),
        line=line if isinstance(line, int) else 0,
        function=_text(raw.get("name")) or "?",
        native=native,
    )


def parse_pyspy_text(text: str) -> tuple[Stack, ...]:
    """``py-spy dump --native``: a frame in a shared library has no line number."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if header := _SPY_THREAD.match(line):
            threads.append((header["name"] or header["id"], []))
        elif threads and (found := _SPY_FRAME.match(line)):
            native = not found["file"].endswith((".py", ">"))
            file = _whole(found["file"])
            frame = Frame(file, _line(found["line"] or ""), found["function"], native)
            threads[-1][1].append(frame)
    return tuple(Stack(name, "py-spy", tuple(frames)) for name, frames in threads)


def _whole(file: str) -> str:
    """py-spy leaves out the folder of installed packages; the user's own files are recognised by
    that folder."""
    package = file.partition("/")[0]
    return f"/site-packages/{file}" if package in _PACKAGES else file


def parse_pystack(text: str) -> tuple[Stack, ...]:
    """``pystack remote`` (with or without ``--native``); prints the outermost frame first."""
    stacks: list[Stack] = []
    thread: str | None = None
    frames: list[Frame] = []

    def close() -> None:
        if thread is not None:
            stacks.append(Stack(thread, "pystack", tuple(reversed(frames))))

    for line in text.splitlines():
        if header := _PYSTACK_THREAD.match(line):
            close()
            thread, frames = header["name"] or header["id"], []
        elif frame := _PYSTACK_FRAME.match(line.rstrip()):
            native = frame["kind"] == "C"
            frames.append(Frame(frame["file"], _line(frame["line"]), frame["function"], native))
    close()
    return tuple(stacks)


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """Threads in a file of ``faulthandler``, the latest dump of each.

    It may have appended several dumps: on request, at SIGTERM, at a fatal signal.
    """
    latest: dict[str, Stack] = {}
    thread: tuple[str, str] | None = None
    frames: list[Frame] = []

    def close() -> None:
        if thread is not None:
            latest[thread[0]] = Stack(thread[1], "faulthandler", tuple(frames))

    for line in text.splitlines():
        if header := _FAULT_THREAD.match(line):
            close()
            thread, frames = (header["id"], header["name"] or header["id"]), []
        elif frame := _FAULT_FRAME.match(line):
            frames.append(Frame(frame["file"], _line(frame["line"]), frame["function"]))
        elif not line.strip():
            close()
            thread = None
    close()
    return tuple(latest.values())


_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|libmpi|libucp"
)  # in names of files and shared libraries
# DDP sends its buffers from C++ that this function calls, in a file outside torch.distributed.
BUFFERS = "_distributed_broadcast_coalesced"
_CALLS = re.compile(r"c10d::|gloo::|nccl[A-Z]|P?MPI_")  # names of native functions
_ON_THE_DEVICE = re.compile(r"[sS]ynchronize|^item$|^_?local_scalar|^tolist$|^cpu$|^nonzero$")
# Inside these the driver spins in functions without names; Python called them.
_DRIVER = re.compile(
    r"^(?:cuda|cu|hip)\w*Synchronize(?:_\w+)?$|\b_local_scalar_dense_(?:cuda|hip)\b"
    r"|c10::(?:cuda|hip)::\w*stream_synchronize"
)


def in_collective(stack: Stack) -> bool:
    """Whether the thread's innermost frames belong to communication."""
    return any(_communicates(frame) for frame in stack.frames[:8] if "/elastic/" not in frame.file)


def _communicates(frame: Frame) -> bool:
    """Whether the frame's file belongs to communication.

    For Python the name of the file decides, because the user's folders may have any name; C++ files
    lie in folders such as ``gloo/transport/tcp``.
    """
    if frame.function.endswith(BUFFERS) or (frame.native and _CALLS.match(frame.function)):
        return True
    name = frame.file if frame.native else frame.file.rpartition("/")[2]
    return "torch/distributed/" in frame.file or _COMMUNICATION.search(name) is not None


def of_user(frames: Iterable[Frame], libraries: Sequence[str] = ()) -> list[Frame]:
    """The frames of one stack or traceback that are of the user's own Python code, innermost first.
    ``libraries``: the folders of libraries that the rank recorded."""
    python = [frame for frame in frames if not frame.native]
    others = in_libraries([frame.file for frame in python], libraries)
    return [frame for frame, other in zip(python, others, strict=True) if not other]


def runs_python(stack: Stack) -> bool:
    """Whether the thread runs Python code; gdb shows only the interpreter's own functions."""
    return any(
        not frame.native or frame.function.startswith("_PyEval_EvalFrame") for frame in stack.frames
    )


def on_the_device(stack: Stack) -> bool:
    """Whether the thread waits for a device, which itself may wait for a collective.

    A thread outside Python, such as NCCL's own, does not wait for the program's work.
    """
    if stack.frames and not runs_python(stack):
        return False
    return any(_ON_THE_DEVICE.search(frame.function) for frame in stack.frames[:8]) or any(
        _DRIVER.search(frame.function) for frame in stack.frames if frame.native
    )


def spawned(stack: Stack) -> bool:
    """Whether Python code started the thread: its outermost Python frame is threading's."""
    return bool(stack.python) and stack.python[-1].function.endswith("_bootstrap")


def waits_for_device(found: Iterable[Stack]) -> bool:
    """Whether one rank's main thread or autograd's waits for the device, in any tool's output.

    Threads that the program started do not count.
    """
    return any(on_the_device(stack) and not spawned(stack) for stack in found)


def in_last_call(found: Iterable[Stack]) -> bool:
    """Whether a thread of a rank is in ``destroy_process_group``."""
    return any(frame.function == LAST_CALL for stack in found for frame in stack.frames)


def that_counts(found: tuple[Stack, ...]) -> Stack | None:
    """Of one rank's threads the one inside a collective, else the main thread.

    Readers list the best source first.
    """
    usable = [stack for stack in found if stack.frames]
    if not usable:
        return None
    threads = [stack for stack in usable if stack.source == usable[0].source]
    return max(threads, key=lambda s: (in_collective(s), s.thread == "MainThread", not spawned(s)))


def in_backward(stack: Stack) -> bool:
    """Whether Python waits for autograd, whose C++ code may itself wait in communication."""
    return bool(stack.python) and "torch/autograd/" in stack.python[0].file


def stand(stack: Stack, libraries: tuple[str, ...] = ()) -> str:
    """``all_reduce, called by step (train.py:12)``: the operation and the user's line."""
    python, own = stack.python, of_user(stack.frames, libraries)[:1]
    inside = [f for f in python if _communicates(f) and "/elastic/" not in f.file]
    called = [f.function for f in inside if not f.file.endswith("c10d_logger.py")
              and not f.function.startswith("_dynamo_disable.")]  # fmt: skip
    if called:
        operation = called[-1]
    elif not python and on_the_device(stack):
        waits = [frame.function for frame in stack.frames if _DRIVER.search(frame.function)]
        text = ", called by ".join(dict.fromkeys((*waits[:1], *waits[-1:])))
        return f"{text} (.item())" if "_local_scalar_dense" in text else text
    else:
        # C++ that Python called: the innermost frame may have no name.
        calls = (f.function for f in stack.frames if f.native and _CALLS.match(f.function))
        first = stack.frames[0].function if stack.frames else ""
        operation = next(calls, first) if not own or own[0] != python[0] else ""
    at = [f"{frame.function} ({frame.name}:{frame.line})" for frame in own]
    return ", called by ".join(filter(None, (operation, *at)))


def _text(value: Any) -> str:
    """A text or a number as text; "" for anything nested."""
    return str(value) if isinstance(value, str | int) else ""


def _line(text: str) -> int:
    return int(text) if len(text) < 10 and text.lstrip("-").isdecimal() else 0
