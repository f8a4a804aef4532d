"""Runs a hunt from its question to its files: lists the release, then checks cell by cell. With
``--against``, two releases by turns, so that a time limit leaves what can be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from moediag.lab.campaign.engine import (
    Clock,
    Display,
    Journal,
    Line,
    Records,
    Strategy,
    drive,
    opened,
)
from moediag.lab.campaign.executors import HERE, Choice, Lost, Maker
from moediag.lab.campaign.executors import opened as executor_opened
from moediag.lab.campaign.hunt import findings_page, layouts
from moediag.lab.campaign.hunt.findings import Hunt, HuntCell, Key, remaining
from moediag.lab.campaign.hunt.pursuit import pursue
from moediag.lab.campaign.hunt.question import (
    PACKAGE,
    PREVIOUS,
    Wanted,
    chosen_relations,
    families_of_each,
    header,
    previous,
    resolutions,
)
from moediag.lab.campaign.hunt.workers import Workers
from moediag.lab.pipeline import register
from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack
from moediag.protocol import ListedFamily, RelationOutcome, ReleaseListing, write_json
from moediag.report import answer_views
from moediag.result import wording

HUNT_FILE = "hunt.json"
PAGE_FILE = "hunt.md"

Item = tuple[int, Key]  # place of its release, cell


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One release."""

    stack: Stack
    maker: Maker[Workers]
    release: str = ""
    """See HuntCell."""
    cells: dict[Key, HuntCell] = dataclasses.field(default_factory=dict)


def run(
    wanted: Wanted, out: Path | None, resume: bool, command: Sequence[str], display: Display,
    executor: Choice = HERE,
) -> tuple[Hunt, Path]:  # fmt: skip
    """Returns what was found, and its folder, which has ``hunt.json`` and ``hunt.md`` beside the
    journal and the evidence. Raises UsageError for a folder that is unusable or belongs to another
    question, StackError if the environment cannot be built, Interrupted after Ctrl-C."""

    def say(text: str, done: float | None) -> None:
        display.stack("hunt", text, done)

    stacks = [environment.ensure(wanted.request(wanted.release), say)]
    if wanted.against:
        stacks.append(environment.ensure(wanted.request(_against(wanted, stacks[0])), say))
    name = "hunt-" + "-against-".join(str(stack.versions[PACKAGE]) for stack in stacks)
    with (
        opened(header(wanted, stacks, command), out, resume, name) as journal,
        contextlib.ExitStack() as stop,
    ):
        remote = stop.enter_context(executor_opened(executor, journal.folder, display.say))
        sides: list[Side] = []
        for stack in stacks:
            release = str(stack.versions[PACKAGE]) if sides else ""
            earlier = stacks[-1] if stack is not stacks[-1] else None  # it loads its files
            asked = wanted, stack, journal.folder.resolve(), release, earlier
            maker = Maker(functools.partial(Workers, *asked), remote, display.doing)
            stop.enter_context(contextlib.closing(maker))
            sides.append(Side(stack, maker, release))
        clock = None
        if wanted.minutes is not None:
            clock = stop.enter_context(Clock(wanted.minutes * 60))
            display.bound = lambda: clock.left
        found = hunt(wanted, sides, journal, display, clock)
        if wanted.pursue:
            found = pursue(wanted, found, stacks[0], sides[0].maker, journal, display, clock)
            put(found, journal.folder)
        return found, journal.folder


def _against(wanted: Wanted, stack: Stack) -> str:
    if wanted.against != PREVIOUS:
        return wanted.against
    return previous(str(stack.versions[PACKAGE]), str(stack.versions["python"]))


def put(found: Hunt, folder: Path) -> None:
    """Writes the pages."""
    page = findings_page.answer(found)
    write_json(folder / HUNT_FILE, page.to_json())
    (folder / PAGE_FILE).write_text(answer_views.markdown(page), encoding="utf-8")


def hunt(
    wanted: Wanted, sides: Sequence[Side], journal: Journal, display: Display, clock: Clock | None
) -> Hunt:
    """Lists the releases unless the journal has the lists, then runs the cells that are missing."""
    records = Records.of(journal, "listing", ReleaseListing)
    listings = []
    for side in sides:
        name = side.release or layouts.SCENARIO
        if name not in records:
            display.say(f"listing the families of transformers {side.stack.versions[PACKAGE]}")
            records.add(name, side.maker.here.listing())
        listings.append(records[name])
    strategy = _Cells(wanted, sides, listings, journal, display, clock)
    drive(strategy, journal, display, wanted.at_once)
    return strategy.hunt("")


class _Cells(Strategy[Item, HuntCell]):
    """Runs cells until none is missing, or the time is up."""

    def __init__(
        self, wanted: Wanted, sides: Sequence[Side], listings: Sequence[ReleaseListing],
        journal: Journal, display: Display, clock: Clock | None,
    ) -> None:  # fmt: skip
        self.families: list[tuple[ListedFamily, ...]] = families_of_each(wanted, listings)
        told = (text for listing in listings for text in resolutions(wanted, listing))
        self.resolutions = tuple(dict.fromkeys(told))
        for text in self.resolutions:
            display.say(text)
        names = chosen_relations(wanted, listings[0])
        self.relations = {name: listings[0].relations[name] for name in names}
        self.sides = sides
        self.folder = journal.folder
        self.display = display
        self.clock = clock
        self.known = register.read()
        self.records = Records.of(journal, "cell", HuntCell)
        places = {side.release: side for side in sides}
        for cell in self.records.values():
            places[cell.release].cells[cell.key] = cell
        releases = " against ".join(str(side.stack.versions[PACKAGE]) for side in sides)
        title = (
            f"transformers {releases}: {findings_page.families(len(self.families[0]))}, "
            f"{wording.plural(len(self.relations), 'relation')}"
        )
        earlier = [cell.seconds for cell in self.records.values()]
        display.begin(title, len(earlier), earlier, wanted.at_once)

    def wanted(self, most: int) -> Sequence[Item]:
        order = {name: number for number, name in enumerate(self.relations)}
        left = [
            (place, key)
            for place, side in enumerate(self.sides)
            for key in remaining(self.families[place], self.relations, side.cells)
        ]
        left.sort(key=lambda item: (item[1][0], order[item[1][1]], item[0]))
        self.display.expect(len(left))
        return [] if self.clock is not None and self.clock.up else left[:most]

    def name(self, item: Item) -> str:
        place, key = item
        release = self.sides[place].release
        return " ".join([*key, *(["on", release] if release else [])])

    def make(self, item: Item) -> HuntCell:
        place, key = item
        found: HuntCell = self.sides[place].maker.call(self.name(item), "make", key)
        return found

    def not_run(self, item: Item, why: Lost) -> HuntCell:
        place, key = item
        return HuntCell(RelationOutcome(*key, problem=str(why)), release=self.sides[place].release)

    def taken(self, item: Item, value: HuntCell) -> None:
        place, key = item
        self.sides[place].cells[key] = value

    def stop(self) -> None:
        for side in self.sides:
            side.maker.stop()

    def line(self, value: HuntCell) -> Line:
        text, good = findings_page.cell_line(value)
        return Line(text, good, value.seconds)

    def done(self) -> str:
        return wording.plural(sum(len(side.cells) for side in self.sides), "finished cell")

    def write(self, incomplete: str) -> None:
        put(self.hunt(incomplete), self.folder)

    def hunt(self, incomplete: str) -> Hunt:
        """Returns what is known of the requested cells."""
        found: Hunt | None = None
        for side, families in reversed([*zip(self.sides, self.families, strict=True)]):
            names = {family.name for family in families}
            known = side.cells.items()
            cells = {k: c for k, c in known if k[0] in names and k[1] in self.relations}
            found = Hunt(
                side.stack.versions, self.relations, families, cells, self.known, incomplete, found,
                resolutions=self.resolutions,
            )  # fmt: skip
        assert found is not None
        return found
