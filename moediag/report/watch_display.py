"""The display of a running watched job: step, speed and memory of each rank.

In a terminal it is a live table below the job's own output, elsewhere an occasional line on stderr.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moediag.records import dataclass
from moediag.report import stderr
from moediag.report.printable import printable
from moediag.result import wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moediag.launch.settings import Progress

_SPAN = 30.0  # seconds over which speed is measured
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment."""

    rank: int
    state: str
    step: int
    speed: float | None  # steps per second, None if unknown
    behind: int  # number of events fewer than the rank with most
    memory: int | None  # bytes, None if unknown


@dataclass(slots=True)
class Pulse:
    """Turns samples of a job into speeds over the last half minute."""

    seen: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)

    def ranks(self, progress: Progress, memory: Mapping[int, int]) -> list[RankView]:
        most = max(progress.events.values(), default=0)
        views = []
        for rank, state in sorted(progress.states.items()):
            if rank < 0:
                continue
            step = progress.steps.get(rank, 0)
            behind = most - progress.events.get(rank, 0)
            speed = self._speed(rank, progress.seconds, step)
            views.append(RankView(rank, state, step, speed, behind, memory.get(rank)))
        return views

    def _speed(self, rank: int, now: float, step: int) -> float | None:
        seen = self.seen.setdefault(rank, deque())
        if not seen or seen[-1][1] != step or now - seen[-1][0] >= 1.0:
            seen.append((now, step))
        while len(seen) > 2 and now - seen[0][0] > _SPAN:
            seen.popleft()
        span = now - seen[0][0]
        return (step - seen[0][1]) / span if span > 0 and step > seen[0][1] else None


def summary(views: list[RankView], doing: str, balance: str = "") -> str:
    """Returns ``4 ranks at step 120, 3.1 steps/s, ahead: rank 3, 1.2 GB``; one line for a log."""
    if not views:
        return "waiting for ranks" if doing == "running" else f"{doing}: no rank runs"
    steps = sorted({v.step for v in views})
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    pieces = [f"{wording.plural(len(views), 'rank')} at {at}"]
    speeds = [v.speed for v in views if v.speed is not None]
    if speeds:
        pieces.append(f"{min(speeds):.2g} steps/s")
    last = [v.rank for v in views if v.behind == max(x.behind for x in views)]
    if len(last) < len(views):
        pieces.append(f"behind: {wording.ranks(last)}")
    memory = [v.memory for v in views if v.memory is not None]
    if memory:
        low, high = min(memory) / 1e9, max(memory) / 1e9
        pieces.append(f"{low:.1f} GB" if high - low < 0.1 else f"{low:.1f} to {high:.1f} GB")
    if balance:
        pieces.append(balance)
    by_state: dict[str, list[int]] = {}
    for v in views:
        by_state.setdefault(v.state, []).append(v.rank)
    if len(by_state) > 1:
        pieces.append(", ".join(f"{wording.ranks(r)} {state}" for state, r in by_state.items()))
    return ", ".join(pieces) if doing == "running" else f"{doing}: {', '.join(pieces)}"


def _head(views: list[RankView], progress: Progress) -> str:
    waits = progress.awaited if progress.doing in ("launching", "running") else ""
    return waits or summary(views, progress.doing, balance_of(progress))


def memory_of(pids: Mapping[int, int]) -> dict[int, int]:
    """Returns the resident bytes of each running rank."""
    found = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
            found[rank] = int(fields[1]) * _PAGE
    return found


class View:
    """Prints lines on stderr; the job's output is not redirected."""

    job_stdout: int | None = None
    job_stderr: int | None = None

    def __init__(self, every: float) -> None:
        self.every = every
        self.pulse = Pulse()
        self._told: float | None = None
        self._doing = self._awaited = ""

    def line(self, text: str) -> None:
        stderr.line(f"moediag: {text}")

    def progress(self, progress: Progress) -> None:
        views = self.pulse.ranks(progress, memory_of(progress.pids))
        due = self._told is None or progress.seconds - self._told >= self.every
        news = progress.doing in ("capturing", "ending") and self._doing != progress.doing
        news = news or bool(progress.awaited and not self._awaited)
        self._doing, self._awaited = progress.doing, progress.awaited
        if ((views or progress.awaited) and due) or news:
            self._told = progress.seconds
            self.line(_head(views, progress))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Allows a page to be printed, for the duration of the context."""
        yield


class LiveView(View):
    """Shows a table below the job's own output, which is forwarded here."""

    def __init__(self, every: float, console: Console) -> None:
        from rich.live import Live

        super().__init__(every)
        self.console = console
        self._views: list[RankView] = []
        self._head = "waiting for ranks"
        self._pipes: list[int] = []
        self._readers: list[threading.Thread] = []
        self.display = Live(
            console=console, get_renderable=self.table, refresh_per_second=4, transient=True
        )
        self.job_stdout = self._pipe(sys.stdout.fileno())
        self.job_stderr = self._pipe(sys.stderr.fileno())

    def _pipe(self, to: int) -> int:
        read, write = os.pipe()
        self._pipes.append(write)
        reader = threading.Thread(target=self._pass_on, args=(read, to), daemon=True)
        self._readers.append(reader)
        return write

    def __enter__(self) -> LiveView:
        self.display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._read()
        for pipe in self._pipes:
            os.close(pipe)
        for reader in self._readers:
            reader.join(timeout=2.0)
        self.display.__exit__(*error)

    def _forwarded(self) -> None:
        """Waits a moment until what the job wrote before this call is printed."""
        until = time.monotonic() + 1.0
        while any(map(_unread, self._pipes)) and time.monotonic() < until:
            time.sleep(0.01)

    def _read(self) -> None:
        """Starts reading at the first update: no thread may run while the job is forked."""
        for reader in self._readers:
            if reader.ident is None:
                reader.start()

    def _pass_on(self, read: int, to: int) -> None:
        """Forwards whole lines, so that the table never splits one."""
        from rich.text import Text

        with os.fdopen(read, "rb") as pipe:
            for line in pipe:
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                if os.isatty(to):
                    self.console.print(Text.from_ansi(text), soft_wrap=True)
                else:
                    os.write(to, line)

    def line(self, text: str) -> None:
        text = printable(f"moediag: {text}")
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        self._read()
        if self._told is None or time.monotonic() - self._told > 0.25:
            self._told = time.monotonic()
            self._views = self.pulse.ranks(progress, memory_of(progress.pids))
            self._head = _head(self._views, progress)

    def table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        grid = Table(
            title=Text(printable(self._head)), title_justify="left", box=None, padding=(0, 2)
        )
        for name in ("rank", "step", "steps/s", "behind", "memory", "state"):
            grid.add_column(name, justify="right" if name != "state" else "left")
        for v in self._views[:16]:
            speed = f"{v.speed:.2g}" if v.speed is not None else ""
            memory = f"{v.memory / 1e9:.2f} GB" if v.memory is not None else ""
            grid.add_row(str(v.rank), str(v.step), speed, f"{v.behind:,}", memory, v.state)
        return grid

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.display.stop()
        self._forwarded()
        try:
            yield
        finally:
            self.display.start(refresh=True)


def _unread(pipe: int) -> int:
    """Returns the number of bytes in a pipe, from either end."""
    size = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


def balance_of(progress: Progress) -> str:
    """Returns the imbalance of the experts' last loads: largest over mean, of the worst block."""
    worst, where = 0.0, ""
    for layer, counts in progress.tokens.items():
        mean = sum(counts) / len(counts) if counts else 0.0
        if mean and max(counts) / mean > worst:
            worst, where = max(counts) / mean, layer
    return f"busiest expert {worst:.1f}x the mean ({where})" if where else ""


@contextlib.contextmanager
def view(no_color: bool, every: float, to_stderr: bool) -> Iterator[View]:
    """Yields a live view in a terminal, else lines. ``to_stderr``: stdout is for data, so the job's
    own output goes to stderr."""
    from moediag.report.consoles import watched_stderr

    console = watched_stderr(no_color)
    if console is not None and sys.stdout.isatty() and not to_stderr:
        with LiveView(every, console) as live:
            yield live
        return
    lines = View(every)
    if to_stderr:
        lines.job_stdout = sys.stderr.fileno()
    yield lines
