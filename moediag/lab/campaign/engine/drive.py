"""The loop of every campaign: asks its strategy for the next item, runs it, records the result.

A finished item is written to the journal before anything else happens. So an interruption loses
only the running items, and the result depends neither on parallelism nor on interruptions.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from moediag.errors import DiskFull, Interrupted, disk_trouble
from moediag.lab.campaign.engine.crew import Crew
from moediag.lab.campaign.engine.display import Display, Line
from moediag.lab.campaign.engine.journal import Journal, Records
from moediag.lab.campaign.executors import Lost
from moediag.launch import signals

AHEAD = 2  # items whose environments are prepared meanwhile

Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T")


class Strategy(ABC, Generic[Q, T]):
    """What a campaign does: ``Q`` is an item to do, ``T`` its result."""

    records: Records[T]
    """Finished results, by the items' names."""
    counted = True
    """False if its items are campaigns that count their own items."""

    @abstractmethod
    def wanted(self, most: int) -> Sequence[Q]:
        """Returns up to ``most`` unfinished items. The campaign waits for the first; the others
        probably come next. Empty: nothing is left to do."""

    @abstractmethod
    def name(self, item: Q) -> str:
        """Returns the item's name in the journal and in messages."""

    @abstractmethod
    def make(self, item: Q) -> T:
        """Runs the item; in a thread if several run at once."""

    @abstractmethod
    def line(self, value: T) -> Line:
        """Returns the result of an item in one line."""

    @abstractmethod
    def done(self) -> str:
        """Returns what is finished, for an interruption: ``3 of 5 trials``."""

    def not_run(self, item: Q, why: Lost) -> T:
        """Returns what the page shows of an item whose job was lost. It is no result: a resumed
        campaign runs the item."""
        raise NotImplementedError(self.name(item)) from why

    def keeps(self, value: T) -> bool:  # noqa: ARG002
        """Whether the result is final. A resumed campaign repeats the others."""
        return True

    def taken(self, item: Q, value: T) -> None:
        """Called with each finished item, after it is recorded."""

    def prepare(self, coming: Sequence[Q]) -> None:
        """Starts to prepare what these items need, and returns at once."""

    def stop(self) -> None:
        """Ends the items of other threads, as after Ctrl-C."""

    def write(self, incomplete: str) -> None:
        """Writes the page of known results. ``incomplete``: why it is incomplete, "" at the end."""


def drive(strategy: Strategy[Q, T], journal: Journal, display: Display, jobs: int = 1) -> None:
    """Runs items until none is left; then writes the page.

    Raises as :func:`resumable`, and an item's exception, after the page was written."""

    lost: set[Q] = set()

    def work(item: Q) -> T:
        if strategy.counted:
            display.begun(strategy.name(item))
        try:
            return strategy.make(item)
        except Lost as why:
            lost.add(item)
            return strategy.not_run(item, why)

    with resumable(journal, strategy.done, strategy.write):
        with Crew(jobs, work, strategy.stop) as crew:
            while wanted := strategy.wanted(jobs + AHEAD):
                for item in wanted[:jobs]:
                    crew.begin(item)
                strategy.prepare(wanted[jobs:])
                for item, value in crew.finished():
                    if item not in lost and strategy.keeps(value):
                        strategy.records.add(strategy.name(item), value)
                    strategy.taken(item, value)
                    if strategy.counted:
                        display.finished(strategy.name(item), strategy.line(value))
                    strategy.write(f"{strategy.done()} finished")  # for a reader, or after a kill
        strategy.write("")


@contextlib.contextmanager
def resumable(
    journal: Journal, done: Callable[[], str], write: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Makes the work inside resumable however it ends. ``done``: finished work in words; ``write``:
    writes its page, given why it is incomplete.

    Raises Interrupted after Ctrl-C and DiskFull, each with the command that resumes it."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        said = f"interrupted after {done()}"
        with signals.held():
            write(said)
        raise Interrupted(
            f"{said}; what is finished is in {journal.folder}",
            f"Nothing is left running.\nTo resume: {journal.resume_command}",
        ) from error
    except BaseException as error:
        with contextlib.suppress(OSError):  # report the original error
            write(f"ended by an error: {error}")
        if trouble := disk_trouble(error):
            raise DiskFull(
                f"{trouble}: {error}; {done()} are finished and kept",
                "Make room: `moediag stacks clean`, old folders in moediag-runs.\n"
                f"To resume: {journal.resume_command}",
            ) from error
        raise
