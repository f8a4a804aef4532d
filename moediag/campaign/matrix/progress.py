"""What a matrix is doing, on stderr: a line a finished cell; in a terminal what is at work too."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from moediag.campaign.bisect.signature_match import Target
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.campaign.matrix.cells import Cell, Key
from moediag.result import wording


class Progress:
    """``write`` takes lines, ``status`` what is going on just now. It is also the watcher of the
    probers that make real cells: of what they tell, :meth:`doing` alone is shown."""

    def __init__(
        self, write: Callable[[str], None], status: Callable[[str], None] = lambda _: None
    ) -> None:
        self.write = write
        self.status = status
        self.done = self.total = 0
        self.at_work: Key | None = None

    def earlier(self, count: int) -> None:
        self.done = self.total = count
        if count:
            self.write(f"{wording.plural(count, 'cell')} of an earlier run")

    def planned(self, count: int) -> None:
        self.total = self.done + count

    def begun(self, key: Key) -> None:
        self.at_work = key
        self.doing(key[1], "starting")

    def made(self, cell: Cell) -> None:
        self.done += 1
        self.write(f"[{self.done}/{self.total}] {one_line(cell)}")

    def doing(self, version: str, text: str) -> None:
        subject = self.at_work[0] if self.at_work else ""
        self.status(f"[{self.done + 1}/{self.total}] {version}  {subject}: {text}")

    def resumed(self, probes: Sequence[ProbeRecord]) -> None: ...

    def learned(self, target: Target) -> None: ...

    def not_learned(self, problem: str) -> None: ...

    def probing(self, version: str, attempt: int) -> None: ...

    def finished(self, record: ProbeRecord) -> None: ...


def one_line(cell: Cell) -> str:
    """``4.53.0  expert-starvation mixtral  fast  0.42 s  susceptible``, and why nothing more is
    known."""
    spent = "" if cell.seconds is None else f"  {wording.seconds(cell.seconds)}"
    why = f" ({cell.text})" if cell.text and cell.shows is None else ""
    return f"{cell.version}  {cell.subject}  {cell.mode}{spent}  {cell.verdict}{why}"


@contextlib.contextmanager
def watching(no_color: bool = False) -> Iterator[Progress]:
    """With a status line when a person watches it."""
    from rich.console import Console

    console = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        with console.status("") as status:
            yield Progress(
                lambda text: console.print(text, markup=False, soft_wrap=True),
                lambda text: status.update(text.replace("[", r"\[")),
            )
    else:
        yield Progress(lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
