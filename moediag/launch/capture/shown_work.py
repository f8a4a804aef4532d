"""What py-spy's JSON of a rank shows of long work, and of its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moediag.launch.capture.py_spy import LAST_CALL, main_frames, threads

# By the files on a stack.
_WORK = {
    "compiles": ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/",
                 "/triton/runtime/", "/triton/backends/", "/torch/utils/cpp_extension"),
    "saves or loads a checkpoint": (
        "/torch/distributed/checkpoint/", "/torch/serialization.py", "/safetensors/torch.py",
        "/torch/distributed/_state_dict_utils.py", "checkpoint_engine",
    ),
    "transfers files over the network": (
        "/urllib3/", "/http/client.py", "/urllib/request.py", "/huggingface_hub/", "/botocore/",
        "/fsspec/", "/gcsfs/", "/s3fs/", "/aiohttp/", "/ftplib.py", "/paramiko/", "/httpcore/",
    ),
    "copies files": ("/shutil.py", "/tarfile.py", "/zipfile"),
    "imports": ("importlib._bootstrap",),
}  # fmt: skip
_SOCKETS = ("/socket.py", "/ssl.py")
_CHILDREN = ("/subprocess.py", "/multiprocessing/pool.py", "/concurrent/futures/process.py")
# Functions that wait until a process may end, and their files.
_ENDS = (
    ("_shutdown", "threading.py"), ("_exit_function", "multiprocessing/util.py"),
    ("_python_exit", "concurrent/futures/"), (LAST_CALL, "torch/distributed/"),
)  # fmt: skip


def work_of(dump: bytes) -> str:
    """Returns a key of ``_WORK``, as ``compiles``, or "", from py-spy's JSON of the main thread."""
    return _work(main_frames(dump))


def waits_for_child(dump: bytes) -> bool:
    """Whether the main thread waits for a process that it started with ``subprocess``, or for what
    a pool of processes returns."""
    return any(str(f.get("filename", "")).endswith(_CHILDREN) for f in main_frames(dump))


def work_at_the_end(dump: bytes) -> str:
    """The same of any thread of a rank that is about to end. There a thread that is inside of a
    socket also counts: it may send the last results."""
    found = [t.get("frames") or [] for t in threads(dump)]
    sockets = "sends or receives over a socket" if any(map(_in_socket, found)) else ""
    return next(filter(None, map(_work, found)), sockets)


def _work(frames: Iterable[Mapping[str, object]]) -> str:
    """Of the innermost frame that shows any: torch imports its compiler for a first step."""
    files = [str(f.get("filename", "")) for f in frames]
    shown = ((file, words, parts) for file in files for words, parts in _WORK.items())
    return next((words for file, words, parts in shown if any(p in file for p in parts)), "")


def _in_socket(frames: list[dict[str, object]]) -> bool:
    """Not of a server that waits for a client."""
    first = next((f for f in frames if not f.get("module")), {})
    name = str(first.get("name", ""))
    return str(first.get("filename", "")).endswith(_SOCKETS) and "accept" not in name


def leaves(dump: bytes, peers_ended: bool) -> bool:
    """Whether only the end of the process is left: its program has returned, and it waits for
    threads or children. Once a peer has ended, anything counts but a loop that waits for events, as
    a server does."""
    frames = [f for f in main_frames(dump) if not f.get("module")]
    named = [(str(f.get("name", "")), str(f.get("filename", ""))) for f in frames]
    if any(name == end and file in path for name, path in named for end, file in _ENDS):
        return True
    return peers_ended and bool(named) and not named[0][1].endswith("/selectors.py")
