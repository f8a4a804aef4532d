"""A matrix from its question to its files: makes the cells that are missing, release by release.

A finished cell is in the state file before anything else happens, so whatever ends this loses the
one at work. Environments and fork hosts are shared; the next release's is built meanwhile.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import moediag
from moediag import doctor
from moediag.campaign.bisect.probe import Releases, new_folder
from moediag.campaign.matrix import state as states
from moediag.campaign.matrix import table_page
from moediag.campaign.matrix.cells import Cell, Key, Matrix, Mode, of_probe, ordered
from moediag.campaign.matrix.fast import predict
from moediag.campaign.matrix.question import MatrixQuestion, Subject
from moediag.campaign.matrix.state import State
from moediag.campaign.matrix.work import plan
from moediag.errors import Interrupted, UsageError
from moediag.launch import signals
from moediag.launch.hosts import Hosts
from moediag.launch.settings import LaunchOptions
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import write_json
from moediag.result import wording
from moediag.stacks.base import cache_root, current_base

if TYPE_CHECKING:
    from moediag.campaign.matrix.progress import Progress

MATRIX_FILE = "matrix.json"
PAGE_FILE = "matrix.md"
HOSTS_FOLDER = "hosts"


class Maker(Protocol):
    """Makes cells; :class:`Cells` is the real one."""

    def make(self, key: Key) -> Cell: ...

    def prepare(self, key: Key) -> None:
        """Begins to make ready what this cell needs, and returns at once."""
        ...

    def close(self) -> None: ...


MakeMaker = Callable[[MatrixQuestion, Path, "Progress"], Maker]


def run(
    question: MatrixQuestion,
    out: Path | None,
    resume: bool,
    command: Sequence[str],
    progress: Progress,
    make: MakeMaker,
) -> tuple[Matrix, Path]:
    """The table, and the folder that holds it as ``matrix.json`` and ``matrix.md`` beside the state
    file and the cells' evidence. Raises UsageError for a folder that cannot be used or belongs to
    another question, Interrupted after Ctrl-C, MoediagError where nothing can be run at all."""
    folder = _folder(question, out, resume)
    digests = {subject.key: subject.digest for subject in question.subjects}
    header = {**question.header(command), "moediag_version": moediag.__version__}
    with states.opened(folder, header, digests, resume) as state:
        maker = make(question, folder, progress)
        try:
            rows = _fill(question, state, maker, progress)
        except (KeyboardInterrupt, Interrupted):
            with signals.held():
                _written(question, question.versions, state, folder)
            raise Interrupted(
                f"interrupted after {len(state.cells)} finished cells; they are in {state.path}",
                f"To go on: {resume_command(command, folder)}",
            ) from None
        finally:
            maker.close()
        return _written(question, rows, state, folder), folder


def _written(question: MatrixQuestion, rows: Sequence[str], state: State, folder: Path) -> Matrix:
    matrix = table(question, rows, state.cells)
    write_json(folder / MATRIX_FILE, table_page.to_json(matrix))
    (folder / PAGE_FILE).write_text(table_page.markdown(matrix), encoding="utf-8")
    return matrix


def table(question: MatrixQuestion, rows: Sequence[str], cells: Mapping[Key, Cell]) -> Matrix:
    """Everything that is known: also what earlier commands asked for in the same folder."""
    there = dict.fromkeys([*question.keys, *(subject for subject, _, _ in cells)])
    return Matrix(
        package=question.package,
        subjects=tuple(there),
        versions=ordered([*rows, *(version for _, version, _ in cells)]),
        cells=cells,
        looked_for={s.key: s.looked_for for s in question.subjects},
        listed=question.listed,
    )


def resume_command(command: Sequence[str], folder: Path) -> str:
    words = [word for word in command if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    return shlex.join([*words, "--resume"])


def _folder(question: MatrixQuestion, out: Path | None, resume: bool) -> Path:
    if resume:
        if out is None:
            raise UsageError(
                "--resume needs the folder of the matrix",
                "Give it with --out; an interrupted matrix prints the whole command.",
            )
        return out.resolve()
    if out is not None and (out / states.STATE_FILE).exists():
        return out.resolve()  # where the message about it comes from
    name = question.subjects[0].question.scenario.name
    return run_folder(out, f"matrix-{name}")


def _fill(
    question: MatrixQuestion, state: State, maker: Maker, progress: Progress
) -> tuple[str, ...]:
    """Makes cells until none is missing; the rows of the table then."""
    progress.earlier(len(state.cells))
    while True:
        wanted = plan(question.way, question.keys, question.versions, question.listed, state.cells)
        if not wanted.work:
            return wanted.rows
        progress.planned(len(wanted.work))
        for place, key in enumerate(wanted.work):
            version = key[1]
            following = next((k for k in wanted.work[place:] if k[1] != version), None)
            if following is not None:
                maker.prepare(following)
            progress.begun(key)
            cell = maker.make(key)
            state.finished(cell)
            progress.made(cell)


def doubtful(matrix: Matrix) -> bool:
    """Something could not be found out, or a run contradicts its prediction."""
    return bool(matrix.disagreements()) or any(c.status is None for c in matrix.unsettled())


def check_page(path: Path) -> None:
    """Raises UsageError for a place where no page can be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--markdown {path}: give a file in a folder that is there")


def write_page(path: Path, matrix: Matrix, command: Sequence[str]) -> None:
    """Puts the table into the markdown page at ``path``, in the place of an earlier one of the same
    scenarios and package. Raises UsageError for a place that cannot be written."""
    scenarios = dict.fromkeys(subject.split(" ")[0] for subject in matrix.subjects)
    words = [w for w in command if w != "--resume"]
    base = current_base(cache_root())
    made = [
        f"`{shlex.join(words)}`",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, moediag {moediag.__version__}, "
        f"torch {base.torch}, Python {base.python}, {doctor.machine()['os']}; {_counted(matrix)}.",
    ]
    section = table_page.markdown(matrix, made)
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        name = f"{matrix.package} {' '.join(scenarios)}"
        path.write_text(table_page.placed(old, name, section), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--markdown {path}: {error.strerror or error}") from error


def _counted(matrix: Matrix) -> str:
    """``61 runs, 420 predictions, 3 places without any``."""
    modes = [cell.mode for cell in matrix.cells.values()]
    parts = [wording.plural(modes.count(Mode.REAL), "run")]
    if Mode.FAST in modes:
        parts.append(wording.plural(modes.count(Mode.FAST), "prediction"))
    if matrix.missing:
        parts.append(f"{wording.plural(matrix.missing, 'place')} without any")
    return ", ".join(parts)


# ------------------------------------------------------------------------ real and fast


class Cells:
    """Real cells are made by the prober of a bisect, one for each subject."""

    def __init__(
        self, question: MatrixQuestion, folder: Path, progress: Progress, launch: LaunchOptions
    ) -> None:
        self.folder = folder
        self.progress = progress
        self.launch = launch
        self.hosts = Hosts(folder / HOSTS_FOLDER, launch)
        self.subjects = {subject.key: subject for subject in question.subjects}
        self.probers = {
            subject.key: Releases(
                subject.question, folder / _word(subject.key), progress, launch, self.hosts
            )
            for subject in question.subjects
        }

    def make(self, key: Key) -> Cell:
        subject, version, mode = key
        return (self._real if mode == Mode.REAL else self._fast)(self.subjects[subject], version)

    def prepare(self, key: Key) -> None:
        self.probers[key[0]].prepare([key[1]])

    def close(self) -> None:
        for prober in self.probers.values():
            prober.close()
        self.hosts.close()

    def _real(self, subject: Subject, version: str) -> Cell:
        record = self.probers[subject.key].probe(version, 1, subject.target)
        cell = of_probe(subject.key, record, subject.digest, subject.question.pattern)
        evidence = f"{_word(subject.key)}/{cell.evidence}" if cell.evidence else ""
        return dataclasses.replace(cell, evidence=evidence)

    def _fast(self, subject: Subject, version: str) -> Cell:
        release = next(r for r in subject.question.releases if r.version == version)
        folder = new_folder(self.folder / _word(subject.key) / "fast", version)
        try:
            return predict(
                subject, release, folder, self.hosts, self.launch,
                lambda text, _: self.progress.doing(version, text),
            )  # fmt: skip
        finally:
            self.probers[subject.key].ahead.end(version)


def _word(key: str) -> str:
    """A subject as a folder."""
    return key.replace(" ", "-")
