"""`moediag top`: parse, call, show."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.cli import options as o
from moediag.report import stderr

if TYPE_CHECKING:
    from rich.table import Table

    from moediag.launch.attach.found_jobs import Job
    from moediag.launch.attach.live import Live, Now

_SINGLE = 16  # more ranks than these are shown in groups
_COLUMNS = ("rank", "does", "line", "since", "CPU", "GPU", "memory", "step")


@o.with_options
def top(
    pid: o.Pid = None,
    every: Annotated[float, typer.Option(min=0.5)] = 2.0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Show what each rank of a running job is doing; q quits, d writes the page of attach.

    No process is stopped. Ranks that do the same are one row if there are many. Without a terminal,
    looks twice and prints the table once.

    Options:
    --every S: Look again after this many seconds.
    """
    from moediag.launch.attach import collecting
    from moediag.launch.attach.live import Live
    from moediag.launch.attach.looking import Target
    from moediag.launch.attach.proc import Proc
    from moediag.launch.processes import Process
    from moediag.pipeline import attach as attaching
    from moediag.report import consoles

    job = attaching.choose(pid)
    numbered, _, _ = collecting.numbered(job, Proc())
    live = Live([Target(r.rank or 0, Process(r.pid, r.started)) for r in numbered.ranks])
    title = attaching.described(numbered)
    console = consoles.output(no_color)
    if not (console.is_terminal and sys.stdin.isatty()):
        live.look()
        time.sleep(every)
        console.print(table(live.look(), title))
        return
    while _shown(live, title, every, no_color) == "d":
        _page(job)


def _shown(live: Live, title: str, every: float, no_color: bool) -> str:
    """Shows the table until a key ends it; returns the key."""
    from rich.live import Live as Display

    from moediag.report import consoles

    keys = f"{title}   q: end   d: write the page"
    with (
        _keys(),
        Display(console=consoles.output(no_color), auto_refresh=False, screen=True) as display,
    ):
        while True:
            now = live.look()
            display.update(table(now, keys), refresh=True)
            if all(one.does == "gone" for one in now):
                return "q"
            until = time.monotonic() + every
            while (left := until - time.monotonic()) > 0:
                if select.select([sys.stdin], [], [], left)[0]:
                    key = os.read(sys.stdin.fileno(), 1).decode(errors="replace").lower()
                    if key in ("q", "d", ""):
                        return key or "q"


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys arrive without Enter; Ctrl-C still interrupts."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _page(job: Job) -> None:
    """Looks as `moediag attach` does, and writes the page beside its evidence."""
    from moediag.launch.attach.collecting import AttachOptions
    from moediag.pipeline import attach as attaching
    from moediag.report import views

    done = attaching.attach(
        job, AttachOptions(), None, lambda text: stderr.line(f"moediag: {text}")
    )
    page = done.folder / "page.html"
    for told in views.write([done.result], {"html": page}, dict):
        stderr.line(told)
    stderr.line(f"{done.result.trials[0].verdict}: moediag report {views.short(done.folder)}")
    time.sleep(2.0)


def table(now: Sequence[Now], title: str) -> Table:
    """One row for each rank, or for ranks that do the same at the same line."""
    from rich.table import Table
    from rich.text import Text

    from moediag.report.printable import printable

    shown = Table(title=Text(printable(title)), title_justify="left", box=None, padding=(0, 1))
    found = rows(now)
    gpu = _COLUMNS.index("GPU")
    shows = [at for at in range(len(_COLUMNS)) if at != gpu or any(row[gpu] for row in found)]
    for name in (_COLUMNS[at] for at in shows):
        left = name in ("rank", "does", "line")
        shown.add_column(name, justify="left" if left else "right", no_wrap=name != "line")
    for row in found:
        shown.add_row(*(Text(printable(row[at])) for at in shows))
    return shown


def rows(now: Sequence[Now]) -> list[tuple[str, ...]]:
    from moediag.result.wording import ranks

    together: dict[object, list[Now]] = {}
    for one in now:
        key = one.rank if len(now) <= _SINGLE else (one.does, one.line)
        together.setdefault(key, []).append(one)
    found: list[tuple[str, ...]] = []
    for group in together.values():
        first = group[0]
        since = min(one.since for one in group)
        steps = {one.step for one in group}
        found.append((
            ranks(one.rank for one in group).partition(" ")[2], first.does, first.line,
            f"{since:.0f} s" if since >= 1 else "", _most(one.cpu for one in group),
            _most(one.gpu for one in group),
            f"{max(one.memory for one in group) / 1e9:.2f} GB",
            steps.pop() if len(steps) == 1 else f"({len(steps)})",
        ))  # fmt: skip
    return found


def _most(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{max(known):.0%}" if known else ""
