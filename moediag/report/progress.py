"""What is happening now, on stderr: a live display in a terminal, one line per event elsewhere.

The run tells an :class:`Observer`; nothing here decides anything, and stdout stays data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moediag.result import RunResult, TrialResult, wording

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console, Group

    from moediag.launch.settings import Progress
    from moediag.scenario.plan import Plan


class Observer(Protocol):
    """What a run reports while it goes on. Calls come from one thread at a time."""

    def series(self, trials: Sequence[int]) -> None:
        """Several plans follow each other, with so many trials each."""

    def plan(self, plan: Plan) -> None: ...

    def stack(self, key: str, text: str, fraction: float | None) -> None:
        """A software stack being made ready; ``fraction`` from 0 to 1, None when not known."""

    def trial_started(self, name: str) -> None: ...

    def trial_progress(self, name: str, progress: Progress) -> None: ...

    def trial_finished(self, result: TrialResult) -> None: ...

    def finished(self, result: RunResult) -> None: ...


class Silent:
    """Says nothing."""

    def series(self, trials: Sequence[int]) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def stack(self, key: str, text: str, fraction: float | None) -> None: ...

    def trial_started(self, name: str) -> None: ...

    def trial_progress(self, name: str, progress: Progress) -> None: ...

    def trial_finished(self, result: TrialResult) -> None: ...

    def finished(self, result: RunResult) -> None: ...


class Count:
    """``done`` of ``total`` trials, over a series of plans where there is one. A plan that ended
    early counts as done when the next one begins."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.number = self.plans = 0
        self._sizes: Sequence[int] = ()

    def series(self, trials: Sequence[int]) -> None:
        self._sizes, self.plans, self.total = trials, len(trials), sum(trials)

    def begin(self, trials: int) -> None:
        if self.plans:
            self.done = sum(self._sizes[: self.number])
            self.number += 1
        else:
            self.done, self.total = 0, trials

    def __str__(self) -> str:
        return f"[{self.done}/{self.total}]"

    @property
    def next(self) -> str:
        """The trial that runs now."""
        return f"[{self.done + 1}/{self.total}]"


class Lines(Silent):
    """One line per event through ``write``, for logs and pipes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.count = Count()
        self.stack_texts: dict[str, str] = {}
        self.doing: dict[str, str] = {}

    def series(self, trials: Sequence[int]) -> None:
        self.count.series(trials)
        self.write(
            f"{wording.plural(len(trials), 'scenario')}, {wording.plural(sum(trials), 'trial')}"
        )

    def plan(self, plan: Plan) -> None:
        self.count.begin(len(plan.trials))
        place = f"scenario {self.count.number} of {self.count.plans}: " if self.count.plans else ""
        self.write(f"{place}{plan.scenario.name}: {wording.plural(len(plan.trials), 'trial')}")

    def stack(self, key: str, text: str, fraction: float | None) -> None:  # noqa: ARG002
        """Once per text: a bar's hundred steps are one line in a log."""
        if self.stack_texts.get(key) != text:
            self.stack_texts[key] = text
            self.write(f"stack {key}: {text}")

    def trial_progress(self, name: str, progress: Progress) -> None:
        if progress.doing == "capturing" and self.doing.get(name) != "capturing":
            self.write(f"{name}: stopped after {wording.seconds(progress.seconds)}, collecting")
        self.doing[name] = progress.doing

    def trial_finished(self, result: TrialResult) -> None:
        self.count.done += 1
        self.write(f"{self.count} {outcome(result)}")


class Live(Silent):
    """Bars for stacks being built, one row of rank states for the trial that runs; finished
    trials scroll past above. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        self.console = console
        self.count = Count()
        self.stacks: dict[str, tuple[str, float | None]] = {}
        self.running: dict[str, Progress | None] = {}
        self.began = time.monotonic()
        self.display = RichLive(
            console=console, get_renderable=self.view, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Live:
        self.display.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.display.__exit__(kind, error, trace)

    def series(self, trials: Sequence[int]) -> None:
        self.count.series(trials)

    def plan(self, plan: Plan) -> None:
        from rich.text import Text

        self.count.begin(len(plan.trials))
        if self.count.plans:
            place = f"{plan.scenario.name} ({self.count.number} of {self.count.plans})"
            self.console.print(Text(place, "bold"), no_wrap=True, overflow="ellipsis")

    def stack(self, key: str, text: str, fraction: float | None) -> None:
        if fraction is not None and fraction >= 1:
            self.stacks.pop(key, None)
        else:
            self.stacks[key] = (text, fraction)

    def trial_started(self, name: str) -> None:
        self.stacks.clear()
        self.running[name] = None

    def trial_progress(self, name: str, progress: Progress) -> None:
        self.running[name] = progress

    def trial_finished(self, result: TrialResult) -> None:
        from rich.text import Text

        self.count.done += 1
        self.running.clear()
        style = "green" if result.met else "bold red"
        mark = Text("ok  " if result.met else "BAD ", style)
        self.console.print(mark.append(outcome(result), ""), no_wrap=True, overflow="ellipsis")

    def view(self) -> Group:
        """What the display shows now; rich calls it from its own thread, so it copies first."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 1))
        for key, (text, fraction) in dict(self.stacks).items():
            bar = ProgressBar(total=1.0, completed=fraction or 0.0, width=24,
                              pulse=fraction is None)  # fmt: skip
            rows.add_row("stack", bar, Text(f"{key} {text}", no_wrap=True, overflow="ellipsis"))
        elapsed = wording.seconds(time.monotonic() - self.began)
        for name, progress in dict(self.running).items():
            states = glance(progress) if progress else "launching"
            line = Text(f"{self.count.next} {name}  {states}", overflow="ellipsis")
            line.no_wrap = True
            return Group(rows, line, Text(f"{elapsed}  Ctrl-C ends the ranks, keeps the evidence",
                                          "dim"))  # fmt: skip
        return Group(rows, Text(elapsed, "dim"))


def outcome(result: TrialResult) -> str:
    """``unfixed: collective-mismatch, culprit rank 1 (0.9 s)``."""
    text = f"{result.variant}: {result.verdict}"
    if result.culprits:
        text += f", culprit {wording.ranks(result.culprits)}"
    if not result.met:
        text += f", expected {result.expected}"
    if result.seconds.total is not None:
        text += f" ({wording.seconds(result.seconds.total)})"
    return text


def glance(progress: Progress) -> str:
    """Rank states in few words: ``running  rank 0 in-collective, rank 1 running  step 2``."""
    by_state: dict[str, list[int]] = {}
    for rank, state in progress.states.items():
        by_state.setdefault(state, []).append(rank)
    states = ", ".join(f"{wording.ranks(members)} {state}" for state, members in by_state.items())
    return "  ".join(filter(None, (progress.doing, states, _step(progress.steps))))


def _step(steps: Mapping[int, int]) -> str:
    latest = max(steps.values(), default=0)
    return f"step {latest}" if latest > 0 else ""
