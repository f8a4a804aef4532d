"""The content of files, whatever they hold; by several processes where there is much to read.

Those processes are expendable, so they may read pickles with the interpreter's own machine, which
takes a tenth of the time of ours: it can be told to import nothing, but a hostile file may still
crash it or keep it busy for ever. Where one is lost, what it left is read by ours.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moediag.evidence import console_output, flight_dump, quickpickle, unpickle
from moediag.evidence.flight_dump import Dump

MAX_JSON = 128 * 1024 * 1024
_MUCH = 3 * 1024 * 1024  # bytes from which several processes are worth their start
_SECONDS = (
    20.0  # of CPU time for one file in a process of its own: a second is usual for the largest
)
_BYTES = 4 << 30  # of memory beyond what such a process starts with


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file's content: a ``dump``, other ``json``, why it is ``refused``; none of these: text."""

    dump: Dump | None = None
    json: Any = None
    refused: str = ""


def loaded(files: Sequence[Path]) -> Iterator[Loaded]:
    """In order."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    size = sum(file.stat().st_size for file in files)
    if size < _MUCH or cores < 2 or len(files) < 2 or threading.active_count() > 1:
        yield from map(load, files)
        return
    done = 0
    for way in (_load_quickly, load):
        for one in _by_processes(way, files[done:], min(cores, 16)):
            done += 1
            yield one
    yield from map(load, files[done:])


def _by_processes(
    way: Callable[[Path], Loaded], files: Sequence[Path], workers: int
) -> Iterator[Loaded]:
    """Of the first files, until a process is lost."""
    if not files:
        return
    # Costs start-up time that few need.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("fork")
    size = max(1, min(8, len(files) // (2 * workers)))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_confine) as pool:
        try:
            yield from pool.map(way, files, chunksize=size)
        except BrokenProcessPool:
            return


def _confine() -> None:
    """Of a process that only reads files: what it makes is freed without a collector."""
    gc.disable()
    faulthandler.disable()  # a crash here is nothing that a person should see
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + _BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load_quickly(path: Path) -> Loaded:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        return load(path, quickpickle.loads)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(path: Path, pickled: Callable[[bytes], Any] = unpickle.loads) -> Loaded:
    """What needs time, and nothing else's knowledge. ``pickled``: reads a pickle."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
            if head[:1] == b"\x80" and head[1:2] <= b"\x05":
                return Loaded(flight_dump.read(pickled(_rest(file, head, unpickle.MAX_BYTES))))
            if head.lstrip()[:1] not in (b"{", b"[") or console_output.prefixed(head):
                return Loaded(refused="neither text nor a dump" if b"\0" in head else "")
            return _json(_rest(file, head, MAX_JSON).decode("utf-8", errors="replace"))
    except (unpickle.Refused, flight_dump.NoDump) as no:
        return Loaded(refused=str(no))
    except OSError as error:
        return Loaded(refused=str(error.strerror))


def _rest(file: BinaryIO, head: bytes, limit: int) -> bytes:
    data = head + file.read(limit - len(head) + 1)
    if len(data) > limit:
        raise unpickle.Refused(f"it has more than {limit >> 20} MiB")
    return data


def _json(text: str) -> Loaded:
    try:
        raw = json.loads(text)
    except RecursionError:
        return Loaded(refused="nested too deeply")
    except ValueError:
        cut = re.match(r'\s*(?:\{\s*"|\[\s*[\[{"])', text)  # JSON to begin with, not a log
        return Loaded(refused="JSON that breaks off" if cut else "")
    return Loaded(flight_dump.read(raw)) if flight_dump.is_dump(raw) else Loaded(json=raw)
