"""What counts as a right answer. Pure; every other module here only fetches answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Truth:
    """About one case. ``verdicts``: any of these is right; ``culprits``: exactly these; ``lines``:
    one of these (``file.py:42``) is named, where there are any; ``says``: is in the cause."""

    name: str
    verdicts: tuple[str, ...]
    culprits: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    says: str = ""

    @property
    def healthy(self) -> bool:
        return self.verdicts == ("clean",)


@dataclass(frozen=True)
class Answer:
    """Of one tool. ``alarm``: it says that something failed. ``verdict``: None from a tool that
    names no class; then neither the class nor our words are asked of it. ``text``: what it says,
    source lines as ``file.py:42``. ``has_lines``: its input held lines that it could have named.
    ``refused``: why it could not answer. ``among``: everybody whom one of its findings names, one
    entry a finding, where ``culprits`` is the first finding only."""

    alarm: bool
    culprits: tuple[int, ...] = ()
    text: str = ""
    verdict: str | None = None
    refused: str = ""
    has_lines: bool = True
    among: tuple[tuple[int, ...], ...] = ()


class Outcome(Enum):
    RIGHT = "right"  # a strict true positive: class, culprit and line
    QUIET = "no alarm"  # of a healthy case
    FALSE_ALARM = "FALSE ALARM"
    REFUSED = "could not"
    MISSED = "missed"
    UNDECIDED = "undecided"
    NOBODY = "nobody named"
    OTHERS = "other ranks named"
    CLASS = "other class"
    LINE = "line not named"
    WORDS = "cause not told"


RANKS_RIGHT = (Outcome.RIGHT, Outcome.CLASS, Outcome.LINE, Outcome.WORDS)


def outcome(truth: Truth, answer: Answer) -> Outcome:
    """The first thing that is wrong with ``answer``, the gravest first. On a healthy case nothing
    but an alarm is wrong."""
    if answer.refused:
        return Outcome.REFUSED
    if truth.healthy:
        return Outcome.FALSE_ALARM if answer.alarm else Outcome.QUIET
    if not answer.alarm:
        return Outcome.UNDECIDED if answer.verdict == "inconclusive" else Outcome.MISSED
    if sorted(answer.culprits) != sorted(truth.culprits):
        return Outcome.OTHERS if answer.culprits else Outcome.NOBODY
    if answer.verdict is not None and answer.verdict not in truth.verdicts:
        return Outcome.CLASS
    if answer.has_lines and not names_one(truth.lines, answer.text):
        return Outcome.LINE
    if answer.verdict is not None and truth.says not in answer.text:
        return Outcome.WORDS
    return Outcome.RIGHT


def names_one(lines: tuple[str, ...], text: str) -> bool:
    """Whether ``text`` names one of ``lines``; true where none is asked for."""
    words = {word.strip("(),;.") for word in text.split()}
    return not lines or not words.isdisjoint(lines)


@dataclass(frozen=True)
class Tally:
    """``failing`` cases, of which ``right`` were answered strictly right and of ``ranks`` at least
    the ranks; ``healthy`` ones that the tool could look at, of which ``alarms`` were false.
    ``kinds``: cases by outcome."""

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
    named = sum(kinds[kind] for kind in RANKS_RIGHT)
    alarms = kinds[Outcome.FALSE_ALARM]
    return Tally(failing, kinds[Outcome.RIGHT], named, healthy, alarms, kinds)
