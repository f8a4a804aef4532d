"""The answer of a command that makes many runs: its state, and the blocks of its page.

Data that prints nothing. :mod:`moediag.report.answer_views` shows it in every view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from moediag.errors import ExitCode
from moediag.records import dataclass
from moediag.result.table import Table
from moediag.result.verdicts import StrEnum


class AnswerState(StrEnum):
    """What an answer says. Each state has one word, which every view shows first, and one exit
    code: what is inconclusive cannot be shown as anything else."""

    AS_EXPECTED = "as expected"
    NO_FAILURE = "no failure found"
    ANSWERED = "answered"
    BROKEN = "expectation broken"
    FAILURE = "failure found"
    INCONCLUSIVE = "inconclusive"
    CANNOT_RUN = "cannot run here"
    BUG = "bug in moediag"

    @classmethod
    def of(cls, failing: object, doubtful: object, fine: AnswerState) -> AnswerState:
        """Returns a failure if there is one, else inconclusive if anything is doubtful, else
        ``fine``."""
        return cls.FAILURE if failing else cls.INCONCLUSIVE if doubtful else fine

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]

    def to_json(self) -> dict[str, Any]:
        return {"state": str(self), "exit_code": self.exit_code}

    @property
    def style(self) -> str:
        """``good``, ``bad`` or ``doubt``."""
        return _STYLES.get(self.exit_code, "doubt")

    @property
    def mark(self) -> str:
        return {"good": "✅", "bad": "❌", "doubt": "❔"}[self.style]


_EXIT_CODES = {
    AnswerState.AS_EXPECTED: ExitCode.OK,
    AnswerState.NO_FAILURE: ExitCode.OK,
    AnswerState.ANSWERED: ExitCode.OK,
    AnswerState.BROKEN: ExitCode.FAILURE_FOUND,
    AnswerState.FAILURE: ExitCode.FAILURE_FOUND,
    AnswerState.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    AnswerState.CANNOT_RUN: ExitCode.CANNOT_RUN_HERE,
    AnswerState.BUG: ExitCode.BUG,
}
_STYLES = {ExitCode.OK: "good", ExitCode.FAILURE_FOUND: "bad", ExitCode.BUG: "bad"}


@dataclass(frozen=True, slots=True)
class Row:
    """A text beside its label."""

    label: str
    """It is empty where the text continues the row before."""
    text: str
    style: str = "plain"
    """``plain``, ``bad``, ``good``, ``doubt`` or ``faint``."""


@dataclass(frozen=True, slots=True)
class Code:
    """Lines that are shown as they are."""

    text: str
    language: str = "text"


@dataclass(frozen=True, slots=True)
class Bars:
    """A picture of numbers that a table has too. Only HTML shows it."""

    title: str
    rows: tuple[tuple[str, float, str], ...]
    """Name, number and style."""
    limit: float = 0.0
    """Drawn as a line; 0: there is none."""


Block = str | Row | Code | Table | Bars  # a str is a sentence


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    blocks: tuple[Block, ...]
    title: str = ""
    """Its heading in a document. A terminal shows none."""
    brief: tuple[Block, ...] | None = None
    """What a terminal shows instead of ``blocks``: nothing if it is empty."""


@dataclass(frozen=True, slots=True)
class Case:
    """One item of the work, for the test views of CI systems."""

    name: str
    group: str
    """What it belongs to, for example the scenario."""
    state: AnswerState | None
    """None: it is skipped, because it does not apply here or fails as it did before."""
    message: str = ""
    text: str = ""
    seconds: float = 0.0
    suite: str = "cases"


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a page shows."""

    command: str
    """``check``: the label of the answer."""
    title: str
    """What was asked, for the head of a document."""
    state: AnswerState
    conclusion: str = ""
    """The answer in one sentence, after the state's word. It may be empty."""
    sections: tuple[Section, ...] = ()
    """The most important first. A terminal, where the end is seen, shows them last to first."""
    rows: tuple[Row, ...] = ()
    """Who or what, where, why and what to do next, beside the verdict."""
    cases: tuple[Case, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The object of ``--json``, without the state and the exit code."""

    @property
    def exit_code(self) -> int:
        return self.state.exit_code

    @property
    def sentence(self) -> str:
        """The state's word and the conclusion."""
        return f"{self.state}: {self.conclusion}" if self.conclusion else str(self.state)

    def to_json(self) -> dict[str, Any]:
        return {**self.facts, **self.state.to_json()}
