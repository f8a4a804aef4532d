"""A campaign of cheap items on the real engine, journal and executors. An item hashes for a
fraction of a second, so a machine of two cores runs hundreds."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moediag.errors import ExitCode, MoediagError
from moediag.lab.campaign.engine import Display, Journal, Line, Records, Strategy, drive, opened
from moediag.lab.campaign.engine.journal import Header
from moediag.lab.campaign.executors import Choice, Lost, Maker
from moediag.lab.campaign.executors import opened as executor_opened

COMMAND = (sys.executable, "-c", f"from {__name__} import command; command()")
HASHES = 150_000  # about 0.05 s, without the lock of the interpreter
PERFORMED = "performed.txt"  # a line for each time that an item ended on a worker


@dataclass(frozen=True)
class Item:
    number: int
    value: str
    problem: str = ""


class Worker:
    """``rest``: seconds that an item sleeps."""

    def __init__(self, folder: Path, rest: float) -> None:
        self.folder = folder
        self.rest = rest

    def make(self, number: int) -> Item:
        value = hashlib.pbkdf2_hmac("sha256", str(number).encode(), b"", HASHES)
        time.sleep(self.rest)
        with (self.folder / PERFORMED).open("a") as file:
            file.write(f"{number}\n")
        return Item(number, value.hex())

    def stop(self) -> None:
        """An item ends by itself."""

    def close(self) -> None:
        """It holds nothing."""


class Items(Strategy[int, Item]):
    def __init__(self, count: int, maker: Maker[Worker], journal: Journal) -> None:
        self.maker = maker
        self.records = Records.of(journal, "item", Item)
        self.done_now = {item.number: item for item in self.records.values()}
        self.count = count

    def wanted(self, most: int) -> Sequence[int]:
        return [number for number in range(self.count) if number not in self.done_now][:most]

    def name(self, item: int) -> str:
        return f"item {item}"

    def make(self, item: int) -> Item:
        found: Item = self.maker.call(self.name(item), "make", item)
        return found

    def not_run(self, item: int, why: Lost) -> Item:
        return Item(item, "", str(why))

    def taken(self, item: int, value: Item) -> None:
        self.done_now[item] = value

    def stop(self) -> None:
        self.maker.stop()

    def line(self, value: Item) -> Line:
        return Line(value.problem or value.value[:8])

    def done(self) -> str:
        return f"{len(self.records)} of {self.count} items"


class Lines(Display):
    """Says on stderr what the executor says."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("items", type=int)
    parser.add_argument("executor")
    parser.add_argument("--executor-arg", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rest", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(words)
    choice = Choice.parse(given.executor, given.executor_arg)
    display = Lines()
    header = Header("items", {"items": given.items})
    with opened(header, given.out, given.resume, "items") as journal:
        worker = functools.partial(Worker, journal.folder, given.rest)
        with executor_opened(choice, journal.folder, display.say) as remote:
            items = Items(given.items, Maker(worker, remote), journal)
            drive(items, journal, display, choice.at_once(given.jobs))
    return ExitCode.OK if len(items.records) == given.items else ExitCode.INCONCLUSIVE


def command() -> None:
    """Runs :func:`main` and ends this process as moediag would."""
    try:
        sys.exit(main())
    except MoediagError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
