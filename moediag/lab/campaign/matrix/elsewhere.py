"""Makes the cells of a matrix as jobs of an executor. Environments are built on this machine."""

from __future__ import annotations

import contextlib
import functools
import pickle
from pathlib import Path

from moediag.errors import StackError
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Choice, Lost, build_here, opened
from moediag.lab.campaign.matrix import session
from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN, Cell, Key
from moediag.lab.campaign.matrix.question import MatrixQuestion
from moediag.lab.campaign.matrix.session import Maker
from moediag.launch.settings import LaunchOptions


def maker(
    question: MatrixQuestion, folder: Path, display: Display, launch: LaunchOptions,
    executor: Choice,
) -> Maker:  # fmt: skip
    """Returns what makes the cells with an executor. ``folder``: of the matrix."""
    if executor.here:
        return session.Cells(question, folder, display, launch)
    return Elsewhere(question, folder, display, launch, executor)


class Elsewhere(Maker):
    """Each job uses :class:`~.session.Cells` on its machine. A cell whose job was lost says so."""

    def __init__(
        self, question: MatrixQuestion, folder: Path, display: Display, launch: LaunchOptions,
        executor: Choice,
    ) -> None:  # fmt: skip
        """See :class:`~.session.Cells`. Raises MachineError if the engine cannot be reached."""
        work = functools.partial(session.Cells, question, folder.resolve(), Display(), launch)
        self._cells = pickle.dumps(work)
        self._subjects = {subject.key: subject for subject in question.subjects}
        self._display = display
        self._executor = executor.kind
        self._engine = contextlib.ExitStack()
        remote = self._engine.enter_context(opened(executor, folder, display.say))
        assert remote is not None, "an executor of this machine"
        self._remote = remote

    def make(self, key: Key) -> Cell:
        name = " ".join(key)
        subject, version = key
        self._build(name, subject, version)
        self._display.doing(name, f"as a job of {self._executor}")
        try:
            cell: Cell = self._remote.on_maker(name, self._cells, "make", key)
        except Lost as lost:
            return Cell(subject, version, COULD_NOT_RUN, text=str(lost))
        return cell

    def prepare(self, key: Key) -> None:
        """Does nothing: the cells that run meanwhile wait for their jobs, not for this machine."""

    def stop(self) -> None:
        self._remote.stop()

    def close(self) -> None:
        self._engine.close()

    def _build(self, name: str, subject: str, version: str) -> None:
        question = self._subjects[subject].question
        release = next(r for r in question.releases if r.version == version)
        with contextlib.suppress(StackError):  # the job fails for the same reason
            build_here([question.request(release)], lambda text, _: self._display.doing(name, text))
