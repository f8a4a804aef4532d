"""Installs the recorder in this process. A watcher that fails does not stop the others."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import socket
import sys
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

import torch

from moediag.protocol import ENV_GUARD, ENV_LAWS, events_file, heartbeat_file, older_events_file
from moediag.recorder.core import Recorder
from moediag.recorder.fresh_folder import run_name
from moediag.recorder.heartbeat import HeartbeatWriter
from moediag.recorder.late_imports import when_imported
from moediag.recorder.library_folders import library_folders
from moediag.recorder.log import SEGMENT_BYTES, EventLog

installed: Optional[Recorder] = None
_PACKAGES = ("transformers", "accelerate")  # a user's job may have them installed and unused


def install(
    folder: str,
    rank: int,
    world_size: int,
    segment_bytes: int = SEGMENT_BYTES,
    of_job: bool = False,
) -> Recorder:
    """Starts recording this process as ``rank`` into ``folder``. Call it once per process, before
    the process group is created. A later call works, but earlier meshes get no axis names.
    ``of_job`` marks a watched job, which may never use FSDP.

    Raises OSError if the log cannot be created; nothing is replaced then.
    """
    global installed
    if installed is not None and installed.active:
        return installed
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    log = EventLog(
        str(place / events_file(rank)),
        str(place / older_events_file(rank)),
        segment_bytes,
    )
    recorder = Recorder(log, HeartbeatWriter(str(place / heartbeat_file(rank))), rank)
    recorder.set_step(1)
    recorder.event(
        "start", keep=True, rank=rank, world_size=world_size, pid=os.getpid(),
        host=socket.gethostname(), python=platform.python_version(), torch=torch.__version__,
        **{package: _version(package, imported=of_job) for package in _PACKAGES},
        backend=None, nccl=_nccl(), libraries=library_folders(), restart=_restart(),
        run=run_name(),
    )  # fmt: skip
    for package in _PACKAGES if of_job else ():
        if package not in sys.modules:
            tell = functools.partial(_imported, recorder, package)
            recorder.on_uninstall.append(when_imported(package, tell))
    for name, start, waits_for in _watchers(folder):
        begin = functools.partial(_begin, recorder, name, start)
        if of_job and waits_for:
            recorder.on_uninstall.append(when_imported(waits_for, begin))
        else:
            begin()
    installed = recorder
    _leave_children_alone(recorder)
    return recorder


def _restart() -> Optional[int]:
    """The restart of this rank, if it uses the store of its elastic agent."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(count) if shared and count.isdigit() else None


def _begin(recorder: Recorder, name: str, start: Callable[[Recorder], None]) -> None:
    if recorder.active:
        try:
            start(recorder)
        except Exception as error:
            recorder.fault(name, error)


def _watchers(folder: str) -> List[Tuple[str, Callable[[Recorder], None], str]]:
    """Returns (name, function, module) of each step. Imports are inside the functions, so that one
    failure does not affect other steps. A step with a module is only needed with that module."""

    def guard(recorder: Recorder) -> None:
        if os.environ.get(ENV_GUARD) == "1":
            from moediag.recorder import guard as watcher

            watcher.install(recorder)

    def collectives(recorder: Recorder) -> None:
        from moediag.recorder import collectives as watcher

        watcher.install(recorder)

    def meshes(recorder: Recorder) -> None:
        recorder.groups.install(recorder.patches)

    def fsdp2(recorder: Recorder) -> None:
        from moediag.recorder import fsdp2 as watcher

        watcher.install(recorder)

    def fsdp1(recorder: Recorder) -> None:
        from moediag.recorder import fsdp1 as watcher

        watcher.install(recorder)

    def modules(recorder: Recorder) -> None:
        from moediag.recorder.modules import Observer

        Observer(recorder).install()

    def experts(recorder: Recorder) -> None:
        from moediag.recorder import routing as watcher

        watcher.install(recorder)

    def gradients(recorder: Recorder) -> None:
        from moediag.recorder.missing_gradients import Gradients

        Gradients(recorder).install()

    def laws(recorder: Recorder) -> None:
        if os.environ.get(ENV_LAWS):
            from moediag.recorder.laws import record

            record(recorder, folder)

    def batches(recorder: Recorder) -> None:
        from moediag.recorder import data_loaders
        from moediag.recorder.data_loaders import Batches

        Batches(recorder).install()
        data_loaders.install(recorder)

    def handled_errors(recorder: Recorder) -> None:
        from moediag.recorder import handled_errors as watcher

        watcher.install(recorder)

    def condition_values(recorder: Recorder) -> None:
        from moediag.recorder import condition_values as watcher

        watcher.install(recorder)

    def exit_calls(recorder: Recorder) -> None:
        from moediag.recorder import exit_calls as watcher

        watcher.install(recorder)

    def watch(recorder: Recorder) -> None:
        from moediag.recorder.background import Watch

        thread = Watch(recorder, folder)
        thread.start()
        recorder.on_uninstall.append(thread.stop)

    return [
        # First, so that its wrappers are under those of the others.
        ("guard", guard, ""),
        ("collectives", collectives, ""),
        ("mesh axes", meshes, ""),
        ("FSDP2 parameters", fsdp2, "torch.distributed.fsdp._fully_shard._fsdp_param_group"),
        ("FSDP1 parameters", fsdp1, "torch.distributed.fsdp._runtime_utils"),
        ("modules", modules, ""),
        ("tokens per expert", experts, ""),
        # Before the gradients' hook: a check belongs to the step before it.
        ("laws", laws, ""),
        ("gradients", gradients, ""),
        ("batches", batches, "torch.utils.data.dataloader"),
        ("handled exceptions", handled_errors, ""),
        ("conditions", condition_values, ""),
        ("exits", exit_calls, ""),
        ("Flight Recorder and lifeline thread", watch, ""),
    ]


def _nccl() -> Optional[str]:
    """Returns the version of the NCCL that torch loaded, else of the one that it was built with,
    without initialising a GPU."""
    try:
        if not torch.distributed.is_nccl_available():
            return None
        found = _loaded_nccl() or torch.cuda.nccl.version()
    except (AttributeError, RuntimeError, ImportError):
        return None
    return ".".join(map(str, found[:3]))


def _loaded_nccl() -> Optional[Tuple[int, ...]]:
    """Returns what the library says that this process calls: LD_PRELOAD's, else torch's, which
    is loaded as well. None if there is none, or before NCCL 2.9, which counted differently."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(None)  # symbols in the order in which they are searched
        if not hasattr(library, "ncclGetVersion"):
            maps = Path("/proc/self/maps").read_text().splitlines()
            paths = [line.split(None, 5)[-1] for line in maps if "/libnccl.so" in line]
            library = ctypes.CDLL(paths[0])
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError, IndexError):
        return None
    code = number.value
    return (code // 10000, code // 100 % 100, code % 100) if code >= 20900 else None


def _imported(recorder: Recorder, package: str) -> None:
    recorder.event("versions", keep=True, **{package: _version(package)})


def _version(package: str, imported: bool = False) -> Optional[str]:
    """Returns the version of the imported module, else of the installed package. ``imported``: None
    if the module is not imported."""
    module: Any = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    if version is None and not (imported and module is None):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
    return None if version is None else str(version)


def _leave_children_alone(recorder: Recorder) -> None:
    """Deactivates the recorder in processes forked from the rank (data loader workers)."""
    reference = weakref.ref(recorder)

    def in_child() -> None:
        present = reference()
        if present is not None:
            present.active = False

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)
