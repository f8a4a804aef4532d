"""Decides which answers are right. Pure; the other modules of this package only collect answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Truth:
    """The correct answer of one case: any of ``verdicts``, exactly ``culprits``, one of ``lines``
    (``file.py:42``) if there are any, and ``says`` in the cause. Not ``decidable``: the evidence
    may be too thin, so to name nobody is right, too."""

    name: str
    verdicts: tuple[str, ...]
    culprits: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    says: str = ""
    decidable: bool = True

    @property
    def healthy(self) -> bool:
        return self.verdicts == ("clean",)


@dataclass(frozen=True)
class Answer:
    """The answer of one tool. ``alarm``: it reports a failure. ``verdict``: None if the tool names
    no class; then neither the class nor our words are required. ``text``: its text, with source
    lines as ``file.py:42``. ``has_lines``: its input contained lines that it could name.
    ``refused``: why it could not answer. ``among``: the ranks of each finding; ``culprits`` are
    those of the first."""

    alarm: bool
    culprits: tuple[int, ...] = ()
    text: str = ""
    verdict: str | None = None
    refused: str = ""
    has_lines: bool = True
    among: tuple[tuple[int, ...], ...] = ()

    @property
    def everybody(self) -> set[int]:
        """The ranks that any finding names."""
        return {rank for named in (self.culprits, *self.among) for rank in named}


class Outcome(Enum):
    RIGHT = "right"  # a strict true positive: class, culprit and line
    QUIET = "no alarm"  # of a healthy case
    FALSE_ALARM = "FALSE ALARM"
    REFUSED = "could not"
    MISSED = "missed"
    UNDECIDED = "undecided"
    ABSTAINED = "nobody named, rightly"
    NOBODY = "nobody named"
    SOME = "only some culprits named"
    OTHERS = "other ranks named"
    CLASS = "other class"
    LINE = "line not named"
    WORDS = "cause not told"


GOOD = (Outcome.RIGHT, Outcome.QUIET, Outcome.ABSTAINED)
RANKS_RIGHT = (Outcome.RIGHT, Outcome.CLASS, Outcome.LINE, Outcome.WORDS)


def outcome(truth: Truth, answer: Answer) -> Outcome:
    """Returns the most serious error in ``answer``. For a healthy case only an alarm is wrong."""
    if answer.refused:
        return Outcome.REFUSED
    if truth.healthy:
        return Outcome.FALSE_ALARM if answer.alarm else Outcome.QUIET
    undecided = answer.alarm or answer.verdict == "inconclusive"
    if not truth.decidable and not answer.culprits and undecided:
        return Outcome.ABSTAINED
    if not answer.alarm:
        return Outcome.UNDECIDED if answer.verdict == "inconclusive" else Outcome.MISSED
    if not answer.culprits and truth.culprits:
        return Outcome.NOBODY
    if set(answer.culprits) != set(truth.culprits):
        return Outcome.SOME if set(answer.culprits) < set(truth.culprits) else Outcome.OTHERS
    if answer.verdict is not None and answer.verdict not in truth.verdicts:
        return Outcome.CLASS
    if answer.has_lines and not names_one(truth.lines, answer.text):
        return Outcome.LINE
    if answer.verdict is not None and truth.says not in answer.text:
        return Outcome.WORDS
    return Outcome.RIGHT


def names_one(lines: tuple[str, ...], text: str) -> bool:
    """Whether ``text`` names one of ``lines``; true if there are none."""
    words = {word.strip("(),;.") for word in text.split()}
    return not lines or not words.isdisjoint(lines)


@dataclass(frozen=True)
class Tally:
    """Counts: of the ``failing`` cases, ``right`` are strictly right (or name nobody where that is
    right, too) and ``ranks`` have at least the right ranks; of the ``healthy`` cases that the tool
    could read, ``alarms`` are false. ``kinds`` counts cases by outcome."""

    failing: int
    right: int
    ranks: int
    healthy: int
    alarms: int
    kinds: Counter[Outcome]


def tally(outcomes: Iterable[tuple[Truth, Outcome]]) -> Tally:
    pairs = list(outcomes)
    kinds = Counter(kind for _, kind in pairs)
    failing = sum(not truth.healthy for truth, _ in pairs)
    healthy = kinds[Outcome.QUIET] + kinds[Outcome.FALSE_ALARM]
    abstained = kinds[Outcome.ABSTAINED]
    named = sum(kinds[kind] for kind in RANKS_RIGHT) + abstained
    alarms = kinds[Outcome.FALSE_ALARM]
    return Tally(failing, kinds[Outcome.RIGHT] + abstained, named, healthy, alarms, kinds)
