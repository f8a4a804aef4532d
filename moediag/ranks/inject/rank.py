"""Decides whether a watched job's process that imported torch.distributed is a rank, and records
it.

A process is a rank if its environment has RANK and no parent is a rank (a data loader's worker
inherits RANK), at the latest when it calls ``init_process_group``. From then on its uncaught
exception and its end are recorded; the recorder starts with the first process group. Any failure in
this module is noted in the run directory and does not affect the job.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moediag import protocol


class _Rank:
    """This process as a rank of the watched job."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.world_size: int | None = None
        self.folder = _folder()
        self.recorder: Any = None
        self.failed = False
        self.met = False
        self.handled: BaseException | None = None  # while the program exits with an error
        self.handled_at = 0  # the training step then
        self.single = False  # a program of one process without a process group, so far

    def claim(self, world_size: int | None) -> None:
        """Writes who and where this process is; from now on records an exception and the end."""
        os.environ[protocol.ENV_RANK_PID] = str(os.getpid())
        self.world_size = world_size
        self.folder.mkdir(parents=True, exist_ok=True)
        me = {
            "pid": os.getpid(), "started": protocol.start_time(), "host": socket.gethostname(),
            "time": time.time(),
            "world_size": world_size, "local_ranks": _number("LOCAL_WORLD_SIZE"),
            "flight_dumps": _flight_dumps(),
        }  # fmt: skip
        protocol.write_json(self.folder / protocol.pid_file(self.rank), me)
        if os.environ.get(protocol.ENV_JOB):
            self.tell(None)
        from moediag.ranks import parent

        parent.allow_tracing()
        previous = sys.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            _guarded(self.error, error)
            previous(kind, error, trace)

        sys.excepthook = hook
        leave = sys.exit

        @functools.wraps(leave)
        def leaving(status: Any = None, /) -> Any:
            # Hydra catches the program's exception, prints it and exits with 1.
            self.handled = sys.exc_info()[1] if status else None
            self.handled_at = self._step()
            leave(status)

        sys.exit = leaving
        atexit.register(_guarded, self.end)
        _guarded(self._as_ray_worker)
        if "multiprocessing.process" in sys.modules:
            _guarded(self._as_child)

    def _step(self) -> int:
        return self.recorder.current_step if self.recorder is not None else 0

    def _as_ray_worker(self) -> None:
        """Handles a worker of Ray Train (2.43 and newer), which runs the training function in a
        thread, catches its exception, and is then ended by Ray."""
        runner = sys.modules.get("ray.train.v2._internal.execution.worker_group.thread_runner")
        original = getattr(runner, "construct_user_exception_with_traceback", None)
        if original is None:
            return

        @functools.wraps(original)
        def construct(error: BaseException, *args: Any, **kwargs: Any) -> Any:
            _guarded(self.error, error)
            return original(error, *args, **kwargs)

        runner.construct_user_exception_with_traceback = construct  # type: ignore[union-attr]

    def _as_child(self) -> None:
        """Handles a child of multiprocessing (``torch.multiprocessing.spawn``). It keeps its
        exception to itself and, if forked, ends without atexit, but its finalizers run."""
        from multiprocessing import process, util

        if process.parent_process() is not None:
            util.Finalize(None, functools.partial(_guarded, self._child_ends), exitpriority=-1000)

    def _child_ends(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:
            error = error.__context__  # torch turns an exception into an exit code
        # torch's CheckpointException is no Exception.
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.error(error)
        self.end()

    def record(self, world_size: int) -> None:
        """Starts the recorder."""
        from moediag.recorder import install, lifeline
        from moediag.recorder.log import SEGMENT_BYTES

        size = int(os.environ.get(protocol.ENV_SEGMENT, SEGMENT_BYTES))
        self.recorder = install(str(self.folder), self.rank, world_size, size, of_job=True)
        lifeline.stacks_beside_others(str(self.folder), self.rank)

    def withdraw(self) -> None:
        """Removes the records of a single process that turns out to have peers, unless a peer has
        taken the place by now."""
        self.failed = True  # nothing more is recorded
        self.recorder.uninstall()
        owner = json.loads((self.folder / protocol.pid_file(self.rank)).read_bytes() or "{}")
        for path in self.folder.glob(f"rank-{self.rank}.*"):
            if owner.get("pid") == os.getpid():
                path.unlink()

    def meet(self, module: Any) -> None:
        """Identifies the job when the ranks have met for the first time."""
        if not self.met and os.getpid() == _own_pid():
            self.met = True
            self.tell(module._get_default_store())

    def tell(self, store: Any) -> None:
        """Records which job this is, as far as ``store`` or an elastic agent knows."""
        from moediag.ranks import job_token

        found = job_token.job(store)
        if found is not None:
            protocol.write_json(self.folder / protocol.job_file(self.rank), found)

    def error(self, error: BaseException) -> None:
        """Records the exception that ends this process, once."""
        if self.failed or os.getpid() != _own_pid():
            return
        self.failed = True
        from moediag.ranks.entry import error_content

        content = error_content(error)
        protocol.write_json(self.folder / protocol.error_file(self.rank), content)
        if self.recorder is not None:
            self.recorder.error(error, _user_frame(error))

    def end(self) -> None:
        """Records the end of the interpreter. A replaced hook may have hidden an exception."""
        if os.getpid() != _own_pid():
            return
        # A program that trained on after its exit caught that as well.
        handled = self.handled if self._step() == self.handled_at else None
        last = getattr(sys, "last_value", None) or handled
        if last is not None:
            self.error(last)
        if self.recorder is not None and not self.failed:
            self.recorder.finish()
        if self.recorder is None and (self.world_size or 0) > 1:
            self.alone()

    def alone(self) -> None:
        """Records that this process has peers but never created a process group, and whether it
        trained. Processes that communicate in another way are left out."""
        if any(name in sys.modules for name in _OTHER_WAYS):
            return
        rpc = sys.modules.get("torch.distributed.rpc")
        if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
            return
        content = {"optimizers": _optimizers()}
        protocol.write_json(self.folder / protocol.alone_file(self.rank), content)


# Libraries that communicate without torch's process groups.
_OTHER_WAYS = ("horovod.torch", "mpi4py.MPI", "torch_xla", "byteps.torch", "jax")
_this: _Rank | None = None


def distributed(module: Any) -> None:
    """Wraps ``init_process_group`` right after ``module`` (torch.distributed.distributed_c10d) ran
    and before torch.distributed did, so that every importer gets the wrapper."""
    rank = _number("RANK")
    if rank is not None and _own_pid() in (None, os.getpid()):
        _guarded(_become, rank, _number("WORLD_SIZE"))
    if protocol.ENV_SIMULATE not in os.environ:
        _follow(module)
        _guarded(_note_children)


def _note_children() -> None:
    """Makes ``multiprocessing`` in this process note how its children ended, if not with 0: a
    launcher such as ``torch.multiprocessing.spawn`` learns it, and nobody else."""
    from multiprocessing.popen_fork import Popen

    poll = Popen.poll

    @functools.wraps(poll)
    def polled(self: Any, flag: int = os.WNOHANG) -> int | None:
        known = self.returncode is not None
        code: int | None = poll(self, flag)
        if code and not known and _folder().is_dir():
            with contextlib.suppress(OSError):
                (_folder() / protocol.child_end_file(self.pid)).write_text(str(code))
        return code

    Popen.poll = polled  # type: ignore[method-assign]


def _follow(module: Any) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        started = _guarded(_before, args, kwargs)
        result = original(*args, **kwargs)
        if not started:
            _guarded(_after, module)
        if _this is not None and protocol.ENV_SIMULATE not in os.environ:
            _guarded(_this.meet, module)
        return result

    module.init_process_group = init_process_group


def simulate(_: Any) -> None:
    """Makes the program's process groups those of a simulated rank, once torch is imported: the
    simulator needs parts of it that import torch.distributed themselves."""
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    simulator, _, steps = os.environ[protocol.ENV_SIMULATE].partition(":")
    replaced = {name: vars(module)[name] for name in ("init_process_group", "new_group")}
    program_rank = importlib.import_module(simulator).ProgramRank(module, _folder(), int(steps))
    program_rank.install(lambda: _this.recorder if _this else None)
    _follow(module)
    importers = [vars(one) for name, one in sys.modules.items() if name.startswith("torch.")]
    for names, (name, original) in itertools.product(importers, replaced.items()):
        if names.get(name) is original:
            names[name] = vars(module)[name]


def optimizers(module: Any) -> None:
    """Records a program of one process, which may never create a process group, for the laws."""
    from moediag.ranks.inject import one_process

    one_process.expect(module.Optimizer, functools.partial(_guarded, _alone))


def ended_early(error: BaseException) -> None:
    """Records the exception of a rank that ends before it imported torch.distributed."""
    from moediag.ranks.entry import error_content

    rank = _number("RANK")
    if rank is not None:
        _folder().mkdir(parents=True, exist_ok=True)
        protocol.write_json(_folder() / protocol.error_file(rank), error_content(error))


def agent(module: Any) -> None:
    """Makes a possible elastic agent (torchrun) in this process report its ranks' ends."""
    from moediag.ranks import agent as observer

    observer.observe(Path(os.environ[protocol.ENV_WATCH]), of_job=True)


def measure(module: Any) -> None:
    """Measures the first training steps of this process, see :mod:`moediag.ranks.verify`, or
    records the state of steps, see :mod:`moediag.ranks.resume`."""
    from moediag.ranks.verify.ending import Ending

    text = os.environ[protocol.ENV_MEASURE]
    states = protocol.StateRequest.of_text(text)
    if states is not None:
        from moediag.ranks.resume.recording import StateRecording

        StateRecording(states, Ending(Path(states.folder), _measured)).install()
        return
    from moediag.ranks.verify.measuring import Measuring

    request = protocol.MeasureRequest.of_text(text)
    Measuring(request, Ending(Path(request.folder), _measured)).install()


def _measured() -> None:
    """Records that this process ends normally, after it has measured enough."""
    if _this is not None:
        _this.end()


def _before(args: Any, kwargs: Any) -> bool:
    """Starts recording before the first group is made, if the rank is known by then."""
    rank = kwargs.get("rank", args[4] if len(args) > 4 else -1)
    size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
    method = kwargs.get("init_method", args[1] if len(args) > 1 else None)
    if rank is None or rank < 0:
        rank = _of_url(method, "rank", "RANK")
    if size is None or size < 0:
        size = _of_url(method, "world_size", "WORLD_SIZE")
    if rank is None or size is None:
        return False
    store = kwargs.get("store", args[5] if len(args) > 5 else None)
    told = {
        "backend": str(kwargs.get("backend", args[0] if args else None) or ""),
        "address": _address(method) if store is None else "",
        "world_size": size,
    }
    _folder().mkdir(parents=True, exist_ok=True)
    protocol.write_json(_folder() / protocol.meeting_file(rank), told)
    return _start(rank, size)


def _address(method: Any) -> str:
    if method is not None and not str(method).startswith("env:"):
        return str(method).partition("?")[0]
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _after(module: Any) -> None:
    """Starts recording if only the backend (MPI) knew the rank."""
    _start(module.get_rank(), module.get_world_size())


def _start(rank: int, world_size: int) -> bool:
    global _this
    if _this is not None and _this.recorder is not None and _own_pid() == os.getpid():
        if not (_this.single and world_size > 1):
            return True  # the process group was created a second time
        _this.withdraw()
        _this = None
    _become(rank, world_size).record(world_size)
    return True


def _alone() -> None:
    """Starts recording a program of one process; the first one, if the job has several."""
    if _this is None:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / protocol.pid_file(0)).open("x").close()
        except FileExistsError:
            note("another process without a process group was recorded")
            return
    elif _this.recorder is not None:
        return
    found = _become(0, 1)
    found.single = True
    found.record(1)


def _become(rank: int, world_size: int | None) -> _Rank:
    global _this
    if _this is None or _this.rank != rank or _own_pid() != os.getpid():
        _this = _Rank(rank)
        _this.claim(world_size)
    return _this


def _own_pid() -> int | None:
    return _number(protocol.ENV_RANK_PID)


def _flight_dumps() -> list[str]:
    """Returns prefixes of torch's watchdog: the user's, else torch's own, old and new."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if os.environ.get(name):
            return [str(Path(os.environ[name]).absolute())]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return ["/tmp/nccl_trace_rank_", str(Path(cache, "torch", "comm_lib_trace_rank_"))]  # noqa: S108


def _folder() -> Path:
    attempt = _number(protocol.ENV_ATTEMPT)
    if attempt is None:
        attempt = _number("TORCHELASTIC_RESTART_COUNT") or 0
    return Path(os.environ[protocol.ENV_WATCH]) / protocol.attempt_folder(attempt)


def _of_url(method: Any, key: str, variable: str) -> int | None:
    """Reads the value from ``tcp://host:port?rank=3``, else from the environment."""
    found = re.search(rf"[?&]{key}=(\d+)", method) if isinstance(method, str) else None
    return int(found[1]) if found else _number(variable)


def _optimizers() -> list[str]:
    """Returns the classes of torch.optim's optimizers that this process constructed: torch wraps
    the ``step`` of a class when its first instance is made."""
    found: list[str] = []
    base = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    waiting = list(base.__subclasses__()) if base is not None else []
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if "step" in vars(one) and getattr(one.step, "hooked", False):
            found.append(one.__name__)
    return sorted(set(found))


def _number(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None


def _user_frame(error: BaseException) -> str:
    """Returns the innermost frame of the user's own code, ``file.py:12 function``; else of any."""
    from moediag.recorder.library_folders import library_folders

    frames = traceback.extract_tb(error.__traceback__)[::-1]
    if not frames:
        return ""
    own = protocol.innermost_user([f.filename for f in frames], library_folders())
    frame = frames[own or 0]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``function``; on failure None, and adds a note."""
    try:
        return function(*args)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        with contextlib.suppress(Exception):
            note(f"{function.__name__}: {error!r} ({where})")
        return None


def note(text: str) -> None:
    """Writes a line to the run directory that says what was not recorded."""
    path = Path(os.environ[protocol.ENV_WATCH]) / protocol.NOT_RECORDED_FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(f"pid {os.getpid()} ({' '.join(sys.argv[:2])}): {text}\n")
