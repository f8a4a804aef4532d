"""Runs a hunt from its question to its files: lists the release, then checks cell by cell.

A cell is one process, forked from a host that imported torch and transformers once. A family that
crashes or uses too much memory or time costs its cell only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from moediag.campaign.engine import Clock, Display, Journal, Line, Records, Strategy, drive, opened
from moediag.campaign.hunt import findings_page, launched, layouts, register
from moediag.campaign.hunt.findings import Hunt, HuntCell, Key, remaining
from moediag.campaign.hunt.question import Wanted, chosen_families, chosen_relations, header
from moediag.errors import StackError
from moediag.launch.base import Launcher
from moediag.launch.launcher import launcher
from moediag.launch.record import LaunchRecord
from moediag.launch.settings import LaunchOptions
from moediag.pipeline.single_process import OFFLINE, why_no_answer
from moediag.protocol import (
    FamiliesTask,
    ModelSpec,
    RelationOutcome,
    RelationTask,
    ReleaseListing,
    Task,
    Trial,
    build,
    output_file,
    write_json,
)
from moediag.result import wording
from moediag.stacks import environment
from moediag.stacks.environment import Stack

HUNT_FILE = "hunt.json"
PAGE_FILE = "hunt.md"
CELLS_FOLDER = "cells"
LISTING_TIMEOUT = 600.0  # seconds; it imports every configuration that may have experts


class Maker(Protocol):
    """Runs cells; :class:`Workers` is the real one."""

    def listing(self) -> ReleaseListing: ...

    def make(self, key: Key) -> HuntCell: ...

    def stop(self) -> None: ...


def run(
    wanted: Wanted, out: Path | None, resume: bool, command: Sequence[str], display: Display
) -> tuple[Hunt, Path]:
    """Returns what was found, and its folder, which has ``hunt.json`` and ``hunt.md`` beside the
    journal and the evidence. Raises UsageError for a folder that is unusable or belongs to another
    question, StackError if the environment cannot be built, Interrupted after Ctrl-C."""
    request = wanted.request
    stack = environment.ensure(request, lambda text, done: display.stack("hunt", text, done))
    name = f"hunt-{stack.versions['transformers']}"
    with (
        opened(header(wanted, stack, command), out, resume, name) as journal,
        contextlib.closing(Workers(wanted, stack, journal.folder)) as workers,
    ):
        return hunt(wanted, stack, journal, workers, display), journal.folder


def hunt(wanted: Wanted, stack: Stack, journal: Journal, maker: Maker, display: Display) -> Hunt:
    """Lists the release unless the journal has the list, then runs the cells that are missing."""
    listings = Records(journal, "listing", _listing, dataclasses.asdict)
    if layouts.SCENARIO not in listings:
        display.say("listing the families of the release")
        listings.add(layouts.SCENARIO, maker.listing())
    with contextlib.ExitStack() as stop:
        clock = None
        if wanted.minutes is not None:
            clock = stop.enter_context(Clock(wanted.minutes * 60))
            display.bound = lambda: clock.left
        strategy = _Cells(wanted, stack, listings[layouts.SCENARIO], journal, maker, display, clock)
        drive(strategy, journal, display, wanted.at_once)
    return strategy.hunt("")


class _Cells(Strategy[Key, HuntCell]):
    """Runs cells until none is missing, or the time is up."""

    def __init__(
        self, wanted: Wanted, stack: Stack, listing: ReleaseListing, journal: Journal, maker: Maker,
        display: Display, clock: Clock | None,
    ) -> None:  # fmt: skip
        self.families = chosen_families(wanted, listing)
        names = chosen_relations(wanted, listing)
        self.relations = {name: listing.relations[name] for name in names}
        self.stack = stack
        self.folder = journal.folder
        self.maker = maker
        self.display = display
        self.clock = clock
        self.known = register.read()
        self.records = Records(journal, "cell", HuntCell.from_json, HuntCell.to_json)
        self.cells: dict[Key, HuntCell] = {cell.key: cell for cell in self.records.values()}
        title = (
            f"transformers {stack.versions['transformers']}: "
            f"{findings_page.families(len(self.families))}, "
            f"{wording.plural(len(self.relations), 'relation')}"
        )
        earlier = [cell.seconds for cell in self.cells.values()]
        display.begin(title, len(earlier), earlier, wanted.at_once)

    def wanted(self, most: int) -> Sequence[Key]:
        left = remaining(self.families, self.relations, self.cells)
        self.display.expect(len(left))
        return [] if self.clock is not None and self.clock.up else left[:most]

    def name(self, item: Key) -> str:
        return " ".join(item)

    def make(self, item: Key) -> HuntCell:
        return self.maker.make(item)

    def taken(self, item: Key, value: HuntCell) -> None:
        self.cells[item] = value

    def stop(self) -> None:
        self.maker.stop()

    def line(self, value: HuntCell) -> Line:
        text, good = findings_page.cell_line(value)
        return Line(text, good, value.seconds)

    def done(self) -> str:
        return wording.plural(len(self.cells), "finished cell")

    def write(self, incomplete: str) -> None:
        found = self.hunt(incomplete)
        write_json(self.folder / HUNT_FILE, findings_page.to_json(found))
        (self.folder / PAGE_FILE).write_text(findings_page.markdown(found), encoding="utf-8")

    def hunt(self, incomplete: str) -> Hunt:
        """Returns what is known of the requested cells."""
        names = {family.name for family in self.families}
        cells = {k: c for k, c in self.cells.items() if k[0] in names and k[1] in self.relations}
        return Hunt(
            self.stack.versions, self.relations, self.families, cells, self.known, incomplete
        )


def _listing(raw: object) -> ReleaseListing:
    found: ReleaseListing = build(ReleaseListing, raw)
    return found


# ------------------------------------------------------------------------ processes


class Workers:
    """One launcher per cell that runs at the same time; each keeps its host."""

    def __init__(self, wanted: Wanted, stack: Stack, folder: Path) -> None:
        self.timeout = wanted.timeout
        self.folder = folder
        self.stopping = threading.Event()
        options = LaunchOptions(environment=OFFLINE, stop=self.stopping)
        self._all = [
            launcher("fork", stack, folder / "hosts" / str(number), options)
            for number in range(wanted.at_once)
        ]
        self._idle: queue.SimpleQueue[Launcher] = queue.SimpleQueue()
        for one in self._all:
            self._idle.put(one)

    def listing(self) -> ReleaseListing:
        """Returns the families, and the relations in one process and on several ranks. Raises
        StackError if the release cannot be listed."""
        folder = self.folder / "listing"
        record = self._run(_trial("listing", FamiliesTask(), "", LISTING_TIMEOUT), folder)
        try:
            listed = ReleaseListing.read(folder)
        except (OSError, ValueError) as error:
            raise StackError(
                f"the families of this release cannot be listed: {why_no_answer(record, folder)}",
                f"What the process printed is in {folder / output_file(0)}.",
            ) from error
        of_ranks = {relation.name: relation.says for relation in layouts.RELATIONS.values()}
        return dataclasses.replace(listed, relations={**listed.relations, **of_ranks})

    def make(self, key: Key) -> HuntCell:
        family, relation = key
        folder = self.folder / CELLS_FOLDER / f"{family}-{relation}"
        begun = time.monotonic()
        if relation in layouts.RELATIONS:
            with self._launcher() as one:
                outcome = launched.check(
                    layouts.RELATIONS[relation], family, one, folder, self.timeout
                )
        else:
            outcome = self._alone(family, relation, folder)
        spent = round(time.monotonic() - begun, 3)
        if all(way.holds for way in outcome.ways) and not outcome.problem:
            shutil.rmtree(folder, ignore_errors=True)
            return HuntCell(outcome, spent)
        return HuntCell(outcome, spent, str(folder.relative_to(self.folder)))

    def _alone(self, family: str, relation: str, folder: Path) -> RelationOutcome:
        """Checks a relation in one process."""
        record = self._run(_trial(relation, RelationTask(relation), family, self.timeout), folder)
        try:
            return RelationOutcome.read(folder)
        except (OSError, ValueError):
            return RelationOutcome(family, relation, problem=why_no_answer(record, folder))

    def stop(self) -> None:
        self.stopping.set()

    def close(self) -> None:
        for one in self._all:
            one.close()

    def _run(self, trial: Trial, folder: Path) -> LaunchRecord:
        with self._launcher() as one:
            return one.run(trial, folder)

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[Launcher]:
        one = self._idle.get()
        try:
            yield one
        finally:
            self._idle.put(one)


def _trial(name: str, task: Task, family: str, timeout: float) -> Trial:
    model = ModelSpec(family=family) if family else ModelSpec()
    return Trial(
        name=name, scenario=layouts.SCENARIO, variant=name, task=task, world_size=1, model=model,
        record=False, timeout=timeout,
    )  # fmt: skip
