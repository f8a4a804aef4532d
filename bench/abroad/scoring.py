"""Decides strictly which answers are right. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.abroad.cases import Truth

HEAD = 12  # lines of a page, beside its cause, in which the fault's line counts as named


class Outcome(Enum):
    RIGHT = "right"
    OPEN = "rightly nobody"  # nothing tells which side is wrong, and nobody is named
    QUIET = "no alarm"  # of a healthy program
    NOBODY = "nobody named"
    WRONG = "WRONG RANK"
    CLASS = "other class"
    LINE = "line not named"
    WORDS = "fact not told"
    MISSING = "NO PAGE"
    ALARM = "FALSE ALARM"
    UNFINISHED = "not finished"  # a healthy program, before our time limit; no alarm either


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
        if said is None:
            return Outcome.UNFINISHED
        return Outcome.ALARM if said.alarm else Outcome.QUIET
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
    if truth.says not in said.text:
        return Outcome.WORDS
    return Outcome.RIGHT if sorted(said.ranks) == sorted(truth.ranks) else Outcome.OPEN


def names_one(places: Sequence[str], text: str) -> bool:
    words = {word.strip("(),;:.'\"") for word in text.split()}
    return not words.isdisjoint(places)


def points(truth: Truth, said: Said | None) -> int:
    """Exactly the right ranks are one point, others minus one. Nobody named, no page and a false
    alarm are none: the last two are counted on their own."""
    if truth.healthy or said is None or not said.alarm:
        return 0
    if sorted(said.ranks) == sorted(truth.ranks):
        return 1
    return -1 if said.ranks else 0


@dataclass(frozen=True)
class Tally:
    faults: int
    healthy: int
    points: int
    kinds: Counter[Outcome]


def tally(judged: Iterable[tuple[Truth, Outcome, int]]) -> Tally:
    cases = list(judged)
    healthy = sum(truth.healthy for truth, _, _ in cases)
    total = sum(score for _, _, score in cases)
    return Tally(len(cases) - healthy, healthy, total, Counter(kind for _, kind, _ in cases))
