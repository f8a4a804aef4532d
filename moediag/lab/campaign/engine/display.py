"""The progress of a campaign on stderr: a live display in a terminal, else one line per event.

It makes no decisions, and stdout remains data. An observer of trials
(:mod:`moediag.lab.pipeline.observer`) that also counts finished items and estimates the time left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from moediag.lab.pipeline.observer import Silent
from moediag.records import dataclass
from moediag.report import stderr
from moediag.report.printable import printable
from moediag.result import wording

if TYPE_CHECKING:
    from rich.console import Console, Group


@dataclass(frozen=True, slots=True)
class Line:
    """A finished item in one line."""

    text: str
    good: bool | None = None
    """None: neither good nor bad."""
    seconds: float | None = None
    """Duration; None if unknown or useless for estimating the next one."""


class Pace:
    """Estimates the remaining time from the average duration of finished items."""

    def __init__(self) -> None:
        self.items = 0
        self.seconds = 0.0

    def add(self, seconds: float | None) -> None:
        if seconds is not None:
            self.items += 1
            self.seconds += seconds

    def left(self, items: int, spent: float = 0.0, at_once: int = 1) -> float | None:
        """Returns seconds until ``items`` more are finished, ``at_once`` in parallel, if the
        running ones have run for ``spent``. None before the first is finished."""
        if not self.items or items <= 0:
            return None
        each = self.seconds / self.items
        return max(0.0, each * items / at_once - min(spent, each))


class Display(Silent):
    """Counts items, of one campaign or of the parts of a series. Prints nothing.

    ``bound``: seconds after which the campaign ends anyway."""

    def __reduce__(self) -> tuple[type[Display], tuple[()]]:
        return Display, ()  # on a worker it prints nothing

    def __init__(self) -> None:
        self.pace = Pace()
        self.bound: Callable[[], float] | None = None
        self.done = 0
        self.total: int | None = None
        self._parts = self._part = self._base = 0
        self._at_work: dict[str, float] = {}  # name -> start time
        self._at_once = 1
        self._most: int | None = None

    # -- what is planned

    def series(self, noun: str, sizes: Iterable[int]) -> None:
        """Announces a series of parts with these numbers of trials."""
        every = list(sizes)
        self._parts, self.total = len(every), sum(every)
        self.say(f"{wording.plural(len(every), noun)}, {wording.plural(self.total, 'trial')}")

    def begin(
        self,
        title: str,
        size: int | None,
        earlier: Iterable[float | None] = (),
        at_once: int = 1,
        most: int | None = None,
    ) -> None:
        """Starts a campaign, or the next part of the series, of ``size`` items, ``at_once`` in
        parallel. ``size`` is None if unknown; ``most`` is then a bound. ``earlier``: seconds of the
        items that an earlier command finished. A part that ended early counts as done when the next
        begins."""
        known = list(earlier)
        for seconds in known:
            self.pace.add(seconds)
        self._at_work.clear()
        self._at_once = at_once
        self._most = most
        if self._parts:
            self._part += 1
            self.done = self._base + len(known)
            self._base += size or 0
            title = f"{self._part} of {self._parts}: {title}"
        else:
            self.done, self.total = len(known), size
        if known:
            title += f", {len(known)} finished by an earlier command"
        self.say(title)

    def expect(self, left: int) -> None:
        """Sets the currently known number of remaining items."""
        self.total = self.done + left

    def skip(self, size: int, seconds: float) -> None:
        """Skips a part of the series that an earlier command finished in ``seconds``."""
        self.pace.items += size
        self.pace.seconds += seconds
        self._part += 1
        self._base += size
        self.done = self._base

    # -- what happens

    def begun(self, name: str) -> None:
        self._at_work[name] = time.monotonic()

    def finished(self, name: str, line: Line) -> None:
        self._at_work.pop(name, None)
        self.done += 1
        self.pace.add(line.seconds)
        self.show(line)

    def show(self, line: Line) -> None:
        """Shows a finished item."""

    def say(self, text: str) -> None:
        """Shows a line."""

    def summary(self, text: str) -> None:
        """Shows the current state in one line that later ones replace."""

    # -- in words

    @property
    def number(self) -> str:
        return f"[{self.done}]" if self.total is None else f"[{self.done}/{self.total}]"

    @property
    def eta(self) -> str:
        """Returns ``about 3 min left``; "" if unknown."""
        total = self.total if self._most is None else self._most
        if total is None:
            return ""
        spent = max((time.monotonic() - t for t in self._at_work.values()), default=0.0)
        left = self.pace.left(total - self.done, spent, self._at_once)
        if left is None:
            return ""
        if self.bound is not None:
            left = min(left, self.bound())
        return f"{'about' if self._most is None else 'at most'} {_roughly(left)} left"


def _roughly(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Lines(Display):
    """Passes one line per event to ``write``, for logs and pipes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self.write = write
        self.stack_texts: dict[str, str] = {}

    def stack(self, key: str, text: str, fraction: float | None) -> None:  # noqa: ARG002
        """Shows each text once: a bar's hundred steps are one line in a log."""
        if self.stack_texts.get(key) != text:
            self.stack_texts[key] = text
            self.write(f"stack {key}: {text}")

    def event(self, text: str) -> None:
        self.write(text)

    def say(self, text: str) -> None:
        self.write(text)

    def show(self, line: Line) -> None:
        self.write("; ".join(filter(None, (f"{self.number} {line.text}", self.eta))))


class Live(Display):
    """Shows stack bars and rows of running items; finished ones scroll past. A context manager."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        super().__init__()
        self.console = console
        self.stacks: dict[str, tuple[str, float | None]] = {}
        self.running: dict[str, str] = {}
        self.foot = ""
        self.began = time.monotonic()
        self.display = RichLive(
            console=console, get_renderable=self.view, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Live:
        self.display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.__exit__(None, None, None)

    def stack(self, key: str, text: str, fraction: float | None) -> None:
        if fraction is not None and fraction >= 1:
            self.stacks.pop(key, None)
        else:
            self.stacks[key] = (text, fraction)

    def begun(self, name: str) -> None:
        super().begun(name)
        self.running[name] = "starting"

    def doing(self, name: str, text: str) -> None:
        self.stacks.clear()
        self.running[name] = text

    def finished(self, name: str, line: Line) -> None:
        self.running.pop(name, None)
        super().finished(name, line)

    def begin(
        self,
        title: str,
        size: int | None,
        earlier: Iterable[float | None] = (),
        at_once: int = 1,
        most: int | None = None,
    ) -> None:
        self.running.clear()
        super().begin(title, size, earlier, at_once, most)

    def say(self, text: str) -> None:
        self._print("", text, "bold")

    def summary(self, text: str) -> None:
        self.foot = text

    def show(self, line: Line) -> None:
        if line.good is None:
            self._print("", line.text)
        elif line.good:
            self._print("ok  ", line.text, "green")
        else:
            self._print("BAD ", line.text, "bold red")

    def _print(self, mark: str, text: str, style: str = "") -> None:
        """Prints a line; ``style`` applies to the mark, or to the text without one."""
        from rich.text import Text

        text = printable(text)
        shown = Text(mark, style).append(text, "") if mark else Text(text, style)
        self.console.print(shown, no_wrap=True, overflow="ellipsis")

    def view(self) -> Group:
        """Returns the current display; rich calls it from its own thread, so it copies first."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def line(text: str, style: str = "") -> Text:
            return Text(printable(text), style, no_wrap=True, overflow="ellipsis")

        rows = Table.grid(padding=(0, 1))
        for key, (text, fraction) in dict(self.stacks).items():
            bar = ProgressBar(total=1.0, completed=fraction or 0.0, width=24,
                              pulse=fraction is None)  # fmt: skip
            rows.add_row("stack", bar, line(f"{key} {text}"))
        running = [
            line(f"{self.number} {name}  {text}") for name, text in dict(self.running).items()
        ]
        elapsed = wording.seconds(time.monotonic() - self.began)
        advice = "Ctrl-C ends the ranks, keeps the evidence" if running else ""
        foot = "  ".join(filter(None, (", ".join(filter(None, (elapsed, self.eta))), advice)))
        summary = [line(self.foot)] if self.foot else []
        return Group(rows, *running, *summary, line(foot, "dim"))


@contextlib.contextmanager
def shown(no_color: bool = False) -> Iterator[Display]:
    """Yields a live display on stderr in a terminal, else lines."""
    from moediag.report.consoles import watched_stderr

    console = watched_stderr(no_color)
    if console is not None:
        with Live(console) as live:
            yield live
    else:
        yield Lines(stderr.line)
