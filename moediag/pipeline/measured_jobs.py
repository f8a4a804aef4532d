"""Watched jobs whose ranks also measure, and end when all of them have measured enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

from moediag.errors import ExitCode
from moediag.launch.settings import OnProgress
from moediag.launch.watched import JobOptions
from moediag.pipeline import watch as watcher
from moediag.protocol import MeasureRequest, StateRequest, read_measured, read_recorded
from moediag.protocol.measured import MEASURED_ENOUGH
from moediag.records import dataclass
from moediag.result import FAILURES, RunResult, Verdict

_EVERY = 0.1  # seconds between two looks at what ranks have measured


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """The options of a command that runs several such jobs."""

    steps: int = 2
    """Steps of the optimizer that are compared."""
    out: Path | None = None
    """The run directory, which must be new or empty."""
    stdout: int | None = None
    """The jobs' file descriptor; default: moediag's own."""
    stderr: int | None = None
    """The jobs' file descriptor; default: moediag's own."""
    on_progress: OnProgress | None = None
    tell: Callable[[str], None] = field(default=lambda _: None)
    """Called with a line about what runs now."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A finished comparison."""

    result: RunResult
    folder: Path

    @property
    def exit_code(self) -> int:
        verdict = self.result.trials[-1].verdict
        if verdict in FAILURES:
            return ExitCode.FAILURE_FOUND
        return ExitCode.OK if verdict == Verdict.CLEAN else ExitCode.INCONCLUSIVE


def measured_job(
    command: Sequence[str],
    folder: Path,
    request: MeasureRequest | StateRequest,
    options: MeasuringOptions,
    example: str,
) -> watcher.Watched:
    """Runs one job until it has measured what ``request`` asks for, or ends. ``example``: the
    right use of moediag's command, for an error."""
    watch_options = watcher.WatchOptions(
        on_hang=watcher.ABORT,
        out=folder,
        job=JobOptions(measure=request, example=example),
        stdout=options.stdout,
        stderr=options.stderr,
    )
    with _ended_in_time(request):
        return watcher.watch(command, watch_options, lambda *_: None, options.on_progress)


@contextmanager
def _ended_in_time(request: MeasureRequest | StateRequest) -> Iterator[None]:
    """Lets the ranks end as soon as all of them have measured what was asked."""
    over, folder = threading.Event(), Path(request.folder)
    read = read_recorded if isinstance(request, StateRequest) else read_measured

    def look() -> None:
        while not over.wait(_EVERY):
            found = read(folder)
            size = max((one.world_size for one in found.values()), default=0)
            if 0 < size <= sum(one.done for one in found.values()):
                with suppress(OSError):
                    (folder / MEASURED_ENOUGH).touch()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
