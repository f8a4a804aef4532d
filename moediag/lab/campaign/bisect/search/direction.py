"""One direction of a search, from the bad end outwards: the next release to probe, and why.

Uses positions instead of indexes: 0 is the bad end, 1 its neighbour, and so on.
"""

from __future__ import annotations

import itertools
from dataclasses import field

from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict, merged
from moediag.lab.campaign.bisect.search.answer import Boundary
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search_machine import Ask
from moediag.records import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Probe:
    """The ``attempt``-th probe (from 1) of the release ``index``."""

    index: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Options:
    """What a search looks for and when it stops."""

    bad: int  # index of the bad end
    good: int | None = None  # index of a good release, older or newer; None: found by growing steps
    window: bool = False  # search both the first bad release and the first good one after it
    verify: bool = True  # probe the boundary's neighbours again
    # after this many undecided releases between bad and good, those between undecided ones are not
    # tried any more (None: all are)
    patience: int | None = None
    # failure rate at the bad end; decides what contradicting probes mean
    rate: Rate = field(default_factory=Rate)


class Seen:
    """What this replay has asked so far. ``attempts``: index -> its verdicts, in order."""

    def __init__(self, ask: Ask[Probe], steady: bool) -> None:
        self._ask = ask
        self._steady = steady
        self.attempts: dict[int, list[ProbeVerdict]] = {}
        self._merged: dict[int, ProbeVerdict] = {}
        self.verified: dict[int, bool] = {}  # index -> its second probe agreed

    def look(self, index: int, chance: float) -> ProbeVerdict:
        """Probes a release for the first time."""
        if index not in self.attempts:
            told = self._ask(Probe(index), chance)
            self.attempts[index], self._merged[index] = [told], told
        return self.verdict(index)

    def again(self, index: int, chance: float) -> ProbeVerdict:
        """Probes a release once more."""
        told = self.attempts[index]
        told.append(self._ask(Probe(index, len(told) + 1), chance))
        self._merged[index] = merged(told, self._steady)
        return told[-1]

    def verdict(self, index: int) -> ProbeVerdict:
        return self._merged[index]


def schedule(last: int, given: int | None, newest_first: bool) -> list[int]:
    """Returns the positions at which to look for a good release, in order: the given one, or else
    the last one if that is the newest release; then growing steps."""
    start, first = 0, []
    if given is not None:
        start, first = given, [given]
    elif newest_first:
        first = [last]
    step, growing = 1, []
    while start + step < last:
        growing.append(start + step)
        step *= 2
    return [p for p in dict.fromkeys([*first, *growing, last]) if p > 0]


class Side:
    """One direction from the bad end, in positions. ``given``: index of the good end, if any."""

    def __init__(
        self, seen: Seen, options: Options, count: int, sign: int, given: int | None
    ) -> None:
        self.seen = seen
        self.options = options
        self.sign = sign
        self.last = count - 1 - options.bad if sign > 0 else options.bad
        start = None if given is None else abs(given - options.bad)
        self.schedule = schedule(self.last, start, newest_first=sign > 0)

    # -- what is known, by position ------------------------------------------------------

    def index(self, position: int) -> int:
        return self.options.bad + self.sign * position

    def known(self) -> dict[int, ProbeVerdict]:
        """Returns position -> verdict, from the bad end outwards."""
        places = sorted(self.sign * (index - self.options.bad) for index in self.seen.attempts)
        return {p: self.seen.verdict(self.index(p)) for p in places if p >= 0}

    def bounds(self, known: dict[int, ProbeVerdict]) -> tuple[int, int | None]:
        """Returns (outermost bad before the innermost good, innermost good or None)."""
        good = next((p for p, v in known.items() if v.kind == Kind.GOOD), None)
        bad = [p for p, v in known.items() if v.kind == Kind.BAD and (good is None or p < good)]
        return (max(bad) if bad else 0), good

    # -- the search ------------------------------------------------------------------------

    def search(self) -> Boundary:
        while self._step():
            pass
        known = self.known()
        bad, good = self.bounds(known)
        between = range(bad + 1, self.last + 1 if good is None else good)
        again = [
            p for p, v in known.items() if good is not None and p > good and v.kind == Kind.BAD
        ]
        verified = self.seen.verified
        confirmed = good is not None and all(verified.get(self.index(p)) for p in (bad, good))
        return Boundary(
            bad=self.index(bad),
            good=None if good is None else self.index(good),
            limit=self.index(self.last),
            after=self.sign > 0,
            undecided=self._ordered([(self.index(p), known[p]) for p in between if p in known]),
            untried=tuple(sorted(self.index(p) for p in between if p not in known)),
            confirmed=confirmed,
            missed=None if good is None else self.options.rate.missed(known[good].trials),
            again=tuple(sorted(map(self.index, again))),
        )

    @staticmethod
    def _ordered(
        found: list[tuple[int, ProbeVerdict]],
    ) -> tuple[tuple[int, ProbeVerdict], ...]:
        return tuple(sorted(found, key=lambda item: item[0]))

    def _step(self) -> bool:
        """Makes one more probe; returns False when this side is finished."""
        known = self.known()
        if known[0].kind != Kind.BAD:
            return False
        bad, good = self.bounds(known)
        if good is None:
            for position in self.schedule:
                if position not in known:
                    self.seen.look(self.index(position), 0.5 if position < self.last else 0.3)
                    return True
        undecided = [p for p in known if p > bad and (good is None or p < good)]
        middle = self._middle(bad, good, undecided)
        if middle is not None:
            self.seen.look(self.index(middle), 0.5)
            return True
        if undecided and self._retried(undecided, good):
            return True
        if good is None:
            return False
        if self.options.verify:
            for position, chance in ((bad, 0.97), (good, 0.03)):
                index = self.index(position)
                if index not in self.seen.verified:
                    told = self.seen.again(index, chance)
                    same = self.seen.verdict(index).kind == known[position].kind
                    self.seen.verified[index] = told.decided and same
                    return True
        return False

    def _middle(self, bad: int, good: int | None, undecided: list[int]) -> int | None:
        """Returns the most informative untried position between the bounds. None if none is left,
        or too many were undecided."""
        end = self.last + 1 if good is None else good
        marks = [bad, *undecided, end]
        gaps = [(a, b) for a, b in itertools.pairwise(marks) if b - a > 1]
        outer = [(a, b) for a, b in gaps if a == bad or b == good]
        if not outer:
            patience = self.options.patience
            if patience is not None and len(undecided) >= patience:
                return None
            outer = gaps
        if not outer:
            return None
        low, high = max(outer, key=lambda gap: (gap[1] - gap[0], -gap[0]))
        return (low + high) // 2

    def _retried(self, undecided: list[int], good: int | None) -> bool:
        """Probes the neighbours again, since another kind of failure may have been transient."""
        edges = [undecided[0]] + ([undecided[-1]] if good is not None else [])
        for position in dict.fromkeys(edges):
            told = self.seen.attempts[self.index(position)]
            if len(told) == 1 and told[0].kind == Kind.OTHER:
                self.seen.again(self.index(position), 0.5)
                return True
        return False
