"""Runs a matrix from its question to its files: makes the missing cells, release by release.

Cells share environments and fork hosts; the next release's environment is built meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moediag.errors import MoediagError
from moediag.lab.campaign.bisect.probe import Releases
from moediag.lab.campaign.dry_run import Cache, DryTrial
from moediag.lab.campaign.engine import Display, Journal, Line, Records, Strategy, drive, opened
from moediag.lab.campaign.executors import HERE, Choice, Lost, Maker
from moediag.lab.campaign.executors import opened as executor_opened
from moediag.lab.campaign.matrix import table_page
from moediag.lab.campaign.matrix.cells import (
    COULD_NOT_RUN,
    Cell,
    Key,
    Matrix,
    of_probe,
    ordered,
)
from moediag.lab.campaign.matrix.question import MatrixQuestion
from moediag.lab.launch.hosts import Hosts
from moediag.launch.settings import LaunchOptions
from moediag.protocol import write_json
from moediag.report import answer_views
from moediag.result import wording

MATRIX_FILE = "matrix.json"
PAGE_FILE = "matrix.md"
HOSTS_FOLDER = "hosts"


def run(
    question: MatrixQuestion, out: Path | None, resume: bool, command: Sequence[str],
    display: Display, launch: LaunchOptions, executor: Choice = HERE,
) -> tuple[Matrix, Path]:  # fmt: skip
    """Returns the table and its folder. The folder has ``matrix.json`` and ``matrix.md`` beside the
    journal and the cells' evidence. Raises UsageError for a folder that is unusable or belongs to
    another question, Interrupted after Ctrl-C, MoediagError if nothing can be run."""
    name = f"matrix-{question.subjects[0].question.scenario.name}"
    jobs = executor.at_once(1)
    with (
        opened(question.header(command), out, resume, name) as journal,
        executor_opened(executor, journal.folder, display.say) as remote,
    ):
        make = functools.partial(Cells, question, journal.folder.resolve(), display, launch)
        with contextlib.closing(Maker(make, remote, display.doing)) as maker:
            strategy = _Fill(question, journal, maker, display, jobs)
            drive(strategy, journal, display, jobs)
        return strategy.table(), journal.folder


def dry_trials(question: MatrixQuestion) -> Iterator[DryTrial]:
    """Yields the trials of all cells in order. Starts no process, builds nothing and makes no
    query."""
    cache = Cache()
    subjects = {subject.key: subject.question for subject in question.subjects}
    for key, version in question.cells:
        asked = subjects[key]
        request = asked.request(next(r for r in asked.releases if r.version == version))
        built = cache.has(request)
        for name in asked.scenario.variants:
            yield DryTrial(key, name, asked.world_size, asked.backend, request, built)


class _Fill(Strategy[Key, Cell]):
    """Makes cells until none is missing."""

    def __init__(
        self, question: MatrixQuestion, journal: Journal, maker: Maker[Cells], display: Display,
        jobs: int,
    ) -> None:  # fmt: skip
        self.question = question
        self.folder = journal.folder
        self.maker = maker
        self.display = display
        self.records = Records.of(journal, "cell", Cell)
        self.cells: dict[Key, Cell] = {cell.key: cell for cell in self.records.values()}
        title = ", ".join(subject.key for subject in question.subjects)
        earlier = [cell.seconds for cell in self.cells.values()]
        display.begin(f"{question.package}: {title}", len(earlier), earlier, jobs)

    def wanted(self, most: int) -> Sequence[Key]:
        work = self.left()
        self.display.expect(len(work))
        return work[:most]

    def name(self, item: Key) -> str:
        return " ".join(item)

    def make(self, item: Key) -> Cell:
        needs = functools.partial(self._needs, *item)
        cell: Cell = self.maker.call(self.name(item), "make", item, needs=needs)
        return cell

    def _needs(self, subject: str, version: str) -> Iterator[Mapping[str, str]]:
        question = next(s.question for s in self.question.subjects if s.key == subject)
        yield from question.setting(version).requests

    def not_run(self, item: Key, why: Lost) -> Cell:
        return Cell(*item, COULD_NOT_RUN, text=str(why))

    def taken(self, item: Key, value: Cell) -> None:
        self.cells[item] = value

    def prepare(self, coming: Sequence[Key]) -> None:  # noqa: ARG002 - of the same release
        if self.maker.remote is not None:  # cells wait for their jobs, not for this machine
            return
        now, *later = self.left()
        following = next((key for key in later if key[1] != now[1]), None)
        if following is not None:
            self.maker.here.prepare(following)

    def stop(self) -> None:
        self.maker.stop()

    def line(self, value: Cell) -> Line:
        return Line(one_line(value), seconds=value.seconds)

    def done(self) -> str:
        return wording.plural(len(self.cells), "finished cell")

    def write(self, incomplete: str) -> None:
        page = table_page.answer(self.table(), incomplete=incomplete)
        write_json(self.folder / MATRIX_FILE, page.to_json())
        (self.folder / PAGE_FILE).write_text(answer_views.markdown(page), encoding="utf-8")

    def left(self) -> list[Key]:
        return [key for key in self.question.cells if key not in self.cells]

    def table(self) -> Matrix:
        """Returns all known cells, including those of earlier commands in the same folder."""
        question = self.question
        there = dict.fromkeys([*question.keys, *(subject for subject, _ in self.cells)])
        versions = [*question.versions, *(version for _, version in self.cells)]
        return Matrix(
            package=question.package,
            subjects=tuple(there),
            versions=ordered(versions),
            cells=self.cells,
            looked_for={s.key: s.looked_for for s in question.subjects},
            listed=question.listed,
        )


def one_line(cell: Cell) -> str:
    """Returns ``4.53.0  expert-starvation mixtral  4.2 s  clean`` and a reason."""
    spent = "" if cell.seconds is None else f"  {wording.seconds(cell.seconds)}"
    why = f" ({cell.text})" if cell.text and cell.shows is None else ""
    return f"{cell.version}  {cell.subject}{spent}  {cell.verdict}{why}"


# ------------------------------------------------------------------------ cells


class Cells:
    """Makes cells with a bisect's prober, one per subject."""

    def __init__(
        self, question: MatrixQuestion, folder: Path, display: Display, launch: LaunchOptions
    ) -> None:
        self.hosts = Hosts(folder / HOSTS_FOLDER, launch)
        self.subjects = {subject.key: subject for subject in question.subjects}
        self.probers = {}
        for subject in question.subjects:
            own, shown = folder / _word(subject.key), _OfCell(display, subject.key)
            self.probers[subject.key] = Releases(subject.question, own, shown, launch, self.hosts)

    def make(self, key: Key) -> Cell:
        subject, version = self.subjects[key[0]], key[1]
        setting = subject.question.setting(version)
        record = self.probers[subject.key].probe(setting, 1, subject.target).record
        cell = of_probe(subject.key, record, subject.digest, subject.question.pattern)
        evidence = f"{_word(subject.key)}/{cell.evidence}" if cell.evidence else ""
        return dataclasses.replace(cell, evidence=evidence)

    def prepare(self, key: Key) -> None:
        with contextlib.suppress(MoediagError):  # the cell fails again and reports it
            self.probers[key[0]].prepare([self.subjects[key[0]].question.setting(key[1])])

    def stop(self) -> None:
        for prober in self.probers.values():
            prober.stop()

    def close(self) -> None:
        for prober in self.probers.values():
            prober.close()
        self.hosts.close()


class _OfCell(Display):
    """Passes on a prober's progress under the cell's name."""

    def __init__(self, display: Display, subject: str) -> None:
        super().__init__()
        self.display = display
        self.subject = subject

    def doing(self, name: str, text: str) -> None:
        self.display.doing(f"{self.subject} {name}", text)


def _word(key: str) -> str:
    """Returns a subject as a folder name."""
    return key.replace(" ", "-")
