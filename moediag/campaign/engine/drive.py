"""The loop of every campaign: asks its strategy what to do next, has it done, writes it down.

A finished item is in the journal before anything else happens, so whatever ends this loses only
the items at work, and the answer depends neither on how many run at once nor on how often it was
interrupted.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from moediag.campaign.engine.crew import Crew
from moediag.campaign.engine.display import Display, Line
from moediag.campaign.engine.journal import Journal, Records
from moediag.errors import DiskFull, Interrupted
from moediag.launch import signals

AHEAD = 2  # items whose environments are made ready meanwhile

Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T")


class Strategy(ABC, Generic[Q, T]):
    """What a campaign does: ``Q`` is an item to do, ``T`` what came of it."""

    records: Records[T]
    """What is finished, by the items' names."""
    counted = True
    """False: its items are campaigns of their own, which count theirs."""

    @abstractmethod
    def wanted(self, most: int) -> Sequence[Q]:
        """Up to ``most`` items that are not finished: the first is what everything waits for, the
        others come next, most probably. Empty: nothing is left to do."""

    @abstractmethod
    def name(self, item: Q) -> str:
        """Of the item, in the journal and for people."""

    @abstractmethod
    def make(self, item: Q) -> T:
        """Does it; in a thread where several run at once."""

    @abstractmethod
    def line(self, value: T) -> Line:
        """What came of an item, in one line."""

    @abstractmethod
    def done(self) -> str:
        """What is finished, for an interruption: ``3 of 5 trials``."""

    def keeps(self, value: T) -> bool:  # noqa: ARG002
        """Whether it is final. What is not is done again by a resumed campaign."""
        return True

    def taken(self, item: Q, value: T) -> None:
        """Called with each finished item, once it is written down."""

    def prepare(self, coming: Sequence[Q]) -> None:
        """Begins to make ready what these items need, and returns at once."""

    def stop(self) -> None:
        """Ends the items that other threads work on, as after Ctrl-C."""

    def write(self, incomplete: str) -> None:
        """Writes the page of what is known. ``incomplete``: why more is not, "" at the end."""


def drive(strategy: Strategy[Q, T], journal: Journal, display: Display, jobs: int = 1) -> None:
    """Until nothing is left to do; then its page is written.

    Raises as :func:`resumable`, and what an item raises, after the page was written."""

    def work(item: Q) -> T:
        if strategy.counted:
            display.begun(strategy.name(item))
        return strategy.make(item)

    with resumable(journal, strategy.done, strategy.write):
        with Crew(jobs, work, strategy.stop) as crew:
            while wanted := strategy.wanted(jobs + AHEAD):
                for item in wanted[:jobs]:
                    crew.begin(item)
                strategy.prepare(wanted[jobs:])
                for item, value in crew.finished():
                    if strategy.keeps(value):
                        strategy.records.add(strategy.name(item), value)
                    strategy.taken(item, value)
                    if strategy.counted:
                        display.finished(strategy.name(item), strategy.line(value))
        strategy.write("")


@contextlib.contextmanager
def resumable(
    journal: Journal, done: Callable[[], str], write: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """What is done inside can be resumed however it ends. ``done``: what is finished, in words;
    ``write``: writes the page of it, given why it is incomplete.

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
        with contextlib.suppress(OSError):  # the error counts
            write(f"ended by an error: {error}")
        if _full(error):
            raise DiskFull(
                f"the disk is full: {error}; {done()} are finished and kept",
                "Make room: `moediag stacks clean`, old folders in moediag-runs.\n"
                f"To resume: {journal.resume_command}",
            ) from error
        raise


def _full(error: BaseException) -> bool:
    code = getattr(error, "errno", None)
    return isinstance(error, DiskFull) or code in (errno.ENOSPC, errno.EDQUOT)
