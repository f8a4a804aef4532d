"""Decides strictly which answers are right. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.abroad.table import Truth

HEAD = 12  # lines of a page, beside its cause, in which the fault's line counts as named


class Outcome(Enum):
    RIGHT = "right"
    QUIET = "no alarm"  # of a healthy program
    NOBODY = "nobody named"
    WRONG = "WRONG RANK"
    CLASS = "other class"
    LINE = "line not named"
    WORDS = "fact not told"
    MISSING = "NO PAGE"
    ALARM = "FALSE ALARM"


RANKS_RIGHT = (Outcome.RIGHT, Outcome.CLASS, Outcome.LINE, Outcome.WORDS)


@dataclass(frozen=True)
class Said:
    """What the page says. ``alarm``: it reports a failure or is inconclusive about one."""

    verdict: str
    ranks: tuple[int, ...]
    text: str
    alarm: bool


def outcome(truth: Truth, places: Sequence[str], said: Said | None) -> Outcome:
    """Returns the most serious error. ``places``: the truth's lines as ``file.py:42``;
    ``said``: None if there was no page before the time limit."""
    if truth.healthy:
        return Outcome.ALARM if said is None or said.alarm else Outcome.QUIET
    if said is None or not said.alarm:
        return Outcome.MISSING
    if said.ranks and sorted(said.ranks) != sorted(truth.ranks):
        return Outcome.WRONG
    if truth.known and truth.ranks and not said.ranks:
        return Outcome.NOBODY
    if said.verdict not in truth.verdicts:
        return Outcome.CLASS
    if places and not names_one(places, said.text):
        return Outcome.LINE
    return Outcome.RIGHT if truth.says in said.text else Outcome.WORDS


def names_one(places: Sequence[str], text: str) -> bool:
    words = {word.strip("(),;:.'\"") for word in text.split()}
    return not words.isdisjoint(places)


def points(kind: Outcome) -> int:
    """A right rank is one point, a wrong one minus one. Nobody named, no page and a false alarm are
    none: the last two are counted on their own."""
    return (kind in RANKS_RIGHT) - (kind is Outcome.WRONG)


@dataclass(frozen=True)
class Tally:
    faults: int
    healthy: int
    points: int
    kinds: Counter[Outcome]


def tally(outcomes: Iterable[tuple[Truth, Outcome]]) -> Tally:
    pairs = list(outcomes)
    healthy = sum(truth.healthy for truth, _ in pairs)
    total = sum(points(kind) for _, kind in pairs)
    return Tally(len(pairs) - healthy, healthy, total, Counter(kind for _, kind in pairs))
