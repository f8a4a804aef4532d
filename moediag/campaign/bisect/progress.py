"""What a bisect is doing, on stderr: a table of releases in a terminal, or a line a probe."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from packaging.version import InvalidVersion, Version

from moediag.campaign.bisect.probe_verdict import Kind, ProbeVerdict, describe, merged
from moediag.campaign.bisect.signature_match import Target
from moediag.campaign.bisect.timeline import ProbeRecord, timeline
from moediag.result import wording

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console, Group

STYLES = {
    Kind.BAD: "bold red",
    Kind.GOOD: "green",
    Kind.OTHER: "magenta",
    Kind.SKIP: "dim",
    Kind.FLAKY: "yellow",
}


class Watcher(Protocol):
    """What a bisect reports while it goes on. :meth:`doing` and :meth:`probing` come from several
    threads with ``--jobs``."""

    def resumed(self, probes: Sequence[ProbeRecord]) -> None:
        """Probes that an earlier run finished."""

    def learned(self, target: Target) -> None: ...

    def not_learned(self, problem: str) -> None:
        """The bad end does not show the failure."""

    def probing(self, version: str, attempt: int) -> None: ...

    def doing(self, version: str, text: str) -> None: ...

    def finished(self, record: ProbeRecord) -> None: ...


class Lines:
    """One line a probe through ``write``, for logs and pipes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.done = 0
        self.wanted: tuple[str, ...] = ()

    def resumed(self, probes: Sequence[ProbeRecord]) -> None:
        self.done = len(probes)
        if probes:
            self.write(f"{wording.plural(self.done, 'probe')} of an earlier run")

    def learned(self, target: Target) -> None:
        self.wanted = target.signatures
        for text in known(target):
            self.write(text)

    def not_learned(self, problem: str) -> None:
        self.write(problem)

    def probing(self, version: str, attempt: int) -> None: ...

    def doing(self, version: str, text: str) -> None: ...

    def finished(self, record: ProbeRecord) -> None:
        self.done += 1
        self.write(f"[{self.done}] {one_line(record, self.wanted)}")


class Live:
    """All releases that were probed, oldest first, those at work among them, and the timeline.
    The last view stays. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        self.target: Target | None = None
        self.problem = ""
        self.records: dict[str, list[ProbeRecord]] = {}
        self.running: dict[str, str] = {}
        self.began = time.monotonic()
        self.display = RichLive(console=console, get_renderable=self.view, refresh_per_second=4)

    def __enter__(self) -> Live:
        self.display.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running.clear()
        self.display.__exit__(kind, error, trace)

    def resumed(self, probes: Sequence[ProbeRecord]) -> None:
        for record in probes:
            self.records.setdefault(record.version, []).append(record)

    def learned(self, target: Target) -> None:
        self.target = target

    def not_learned(self, problem: str) -> None:
        self.problem = problem

    def probing(self, version: str, attempt: int) -> None:
        self.running[version] = "again" if attempt > 1 else "starting"

    def doing(self, version: str, text: str) -> None:
        self.running[version] = text

    def finished(self, record: ProbeRecord) -> None:
        self.running.pop(record.version, None)
        self.records.setdefault(record.version, []).append(record)

    def view(self) -> Group:
        """What the display shows now; rich calls it from its own thread, so it copies first."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        steady = self.target is None or self.target.rate.steady
        records, running = dict(self.records), dict(self.running)
        every = [*records, *(name for name in running if name not in records)]
        releases = sorted(filter(_release, every), key=Version)
        versions = [*releases, *(name for name in every if not _release(name))]
        verdicts: dict[int, ProbeVerdict] = {}
        table = Table.grid(padding=(0, 2))
        for place, version in enumerate(versions):
            probed = list(records.get(version, ()))
            cells = ["", "", ""]
            style = "bold"
            if probed:
                verdicts[place] = merged([r.verdict for r in probed], steady)
                kind = verdicts[place].kind
                style = STYLES[kind]
                spent = sum(r.seconds or 0.0 for r in probed)
                again = f"{len(probed)} probes, " if len(probed) > 1 else ""
                wanted = self.target.signatures if self.target else ()
                text = verdicts[place].text
                shown = "" if text in wanted else text
                cells = [str(kind), f"{again}{wording.seconds(spent)}", shown]
            if version in running:
                cells[2] = running[version]
            uploaded = probed[0].uploaded[:10] if probed else ""
            table.add_row(
                version,
                Text(uploaded, "dim"),
                Text(cells[0], style),
                cells[1],
                Text(cells[2], no_wrap=True, overflow="ellipsis"),
            )
        lines = [Text(text, "dim") for text in known(self.target)] if self.target else []
        if self.problem:
            lines.append(Text(self.problem))
        probed_releases = {i: v for i, v in verdicts.items() if i < len(releases)}
        foot = [Text(timeline(releases, probed_releases))] if probed_releases else []
        if running:
            elapsed = wording.seconds(time.monotonic() - self.began)
            foot.append(Text(f"{elapsed}  Ctrl-C ends the ranks and says how to go on", "dim"))
        return Group(*lines, table, *foot)


def _release(name: str) -> bool:
    """And not a commit or a mixed environment; their names hold a space."""
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


@contextlib.contextmanager
def watching(no_color: bool = False) -> Iterator[Watcher]:
    """Live on stderr when a person watches it, lines otherwise."""
    from rich.console import Console

    console = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        with Live(console) as live:
            yield live
    else:
        yield Lines(lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201


def known(target: Target) -> list[str]:
    """Which failure is looked for, and how often it shows."""
    text = [f"looking for ({target.match}): {signature}" for signature in target.signatures]
    rate = target.rate
    if not rate.steady:
        repeats = wording.plural(rate.repeats(), "clean trial")
        text.append(
            f"it showed in {rate.shown} of {rate.trials} trials, so {repeats} make a release good"
        )
    return text


def one_line(record: ProbeRecord, wanted: Sequence[str] = ()) -> str:
    """``4.53.0  12.1 s  bad``; what showed follows, unless it is among ``wanted``."""
    again = f" (probe {record.attempt})" if record.attempt > 1 else ""
    spent = "" if record.seconds is None else f"  {wording.seconds(record.seconds)}"
    verdict = record.verdict
    what = str(verdict.kind) if verdict.text in wanted else describe(verdict)
    return f"{record.version}{again}{spent}  {what}"
