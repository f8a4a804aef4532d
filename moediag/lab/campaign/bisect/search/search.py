"""Searches the release that broke a scenario and the one that fixed it; no processes, no files.

From the bad end outwards, releases are first bad and then good. ``before`` searches older releases
for where the failure began, ``after`` newer ones for where it ended. Both are the same search, in
*positions*: 0 is the bad end, 1 its neighbour, and so on.

1. Probe the bad end. If it is not bad there is nothing to search.
2. Find a good end: the given one, or growing steps outwards (1, 2, 4, …, the last release). A
   window tries the newest release first: it shows at once whether the failure still exists.
3. Halve between the outermost bad and the innermost good release, repeatedly. Undecided releases
   move no bound. Places next to bad and good are tried before those between undecided ones, because
   releases that cannot be tried come in stretches.
4. Retry undecided neighbours if another failure hid them (it may be transient).
5. Probe both neighbours of the boundary again. A release that contradicts itself is FLAKY, and the
   search continues without it.

A contradicting probe (a bad release beyond a good one) never moves a bound; it is part of the
answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict, merged
from moediag.lab.campaign.bisect.search.answer import Answer, Boundary, Status
from moediag.lab.campaign.bisect.search.direction import Options, Probe, Seen, Side, schedule
from moediag.lab.campaign.bisect.search.search_machine import Ask, Machine

__all__ = ["Options", "Probe", "Search", "most_probes"]


class Search(Machine[Probe, Answer]):
    """A search over ``count`` releases, index 0 the oldest. Raises ValueError for invalid options.

    ``next(k)``, ``told(probe, verdict)`` and ``answer`` are :class:`Machine`'s. The answer depends
    neither on ``k`` nor on the order of ``told``.
    """

    def __init__(self, count: int, options: Options) -> None:
        super().__init__()
        for name, index in (("bad", options.bad), ("good", options.good)):
            if index is not None and not 0 <= index < count:
                raise ValueError(f"{name} is {index}, there are {count} releases")
        if options.good == options.bad:
            raise ValueError(f"bad and good are the same release, {options.bad}")
        self.count = count
        self.options = options

    @property
    def verdicts(self) -> dict[int, ProbeVerdict]:
        """Returns the combined verdict of each probed release, oldest first."""
        attempts: dict[int, list[ProbeVerdict]] = {}
        for probe in sorted(self.known):
            attempts.setdefault(probe.index, []).append(self.known[probe])
        steady = self.options.rate.steady
        return {index: merged(told, steady) for index, told in attempts.items()}

    def _check(self, question: Probe) -> None:
        if not 0 <= question.index < self.count or question.attempt < 1:
            raise ValueError(f"{question} of {self.count} releases")

    def _decide(self, ask: Ask[Probe]) -> Answer:
        options = self.options
        seen = Seen(ask, options.rate.steady)
        end = seen.look(options.bad, 0.95)
        if end.kind != Kind.BAD:
            return self._without_end(end)
        for index, chance in self._other_ends():
            seen.look(index, chance)
        good_before = options.good is not None and options.good < options.bad
        good_after = options.good is not None and options.good > options.bad
        began = ended = None
        if options.window or not good_after:
            side = Side(seen, options, self.count, -1, options.good if good_before else None)
            began = side.search()
        if options.window or good_after:
            side = Side(seen, options, self.count, +1, options.good if good_after else None)
            ended = side.search()
        end = seen.verdict(options.bad)
        if end.kind != Kind.BAD:  # it contradicted itself in a second probe
            return self._without_end(end)
        boundaries = [b for b in (began, ended) if b is not None]
        closed = all(b.good is not None for b in boundaries)
        given = None
        if options.good is not None and seen.verdict(options.good).kind != Kind.GOOD:
            given = (options.good, seen.verdict(options.good))
        return Answer(
            Status.FOUND if closed else Status.OPEN,
            options.bad,
            end,
            began,
            ended,
            given,
            tuple(self._beside(boundaries, seen)),
        )

    def _other_ends(self) -> Iterator[tuple[int, float]]:
        """Returns both ends first: the given good one, and the newest release for a window."""
        good, bad, newest = self.options.good, self.options.bad, self.count - 1
        if good is not None:
            yield good, 0.05
        if self.options.window and bad < newest and (good is None or good < bad):
            yield newest, 0.3

    def _without_end(self, end: ProbeVerdict) -> Answer:
        status = Status.NOT_REPRODUCED if end.kind == Kind.GOOD else Status.UNDECIDED
        return Answer(status, self.options.bad, end)

    def _beside(self, boundaries: list[Boundary], seen: Seen) -> Iterator[tuple[int, Kind]]:
        """Returns releases off the search's path that are good among bad or bad among good."""
        for index, verdict in self.verdicts.items():
            if index in seen.attempts or not verdict.decided:
                continue
            for b in boundaries:
                sign = 1 if b.after else -1
                place, bad = sign * (index - self.options.bad), sign * (b.bad - self.options.bad)
                good = None if b.good is None else sign * (b.good - self.options.bad)
                among_bad = 0 < place < bad and verdict.kind == Kind.GOOD
                among_good = good is not None and place > good and verdict.kind == Kind.BAD
                if among_bad or among_good:
                    yield index, verdict.kind


def most_probes(count: int, options: Options) -> int:
    """Returns the most probes that a clean history needs: one stretch of bad releases, every
    release can be tried, and the given good release is good."""
    given = None if options.good is None else options.good - options.bad
    total = 1
    if options.window or given is None or given < 0:
        start = -given if given is not None and given < 0 else None
        total += _most(options, schedule(options.bad, start, False), start is not None)
    if options.window or (given is not None and given > 0):
        start = given if given is not None and given > 0 else None
        last = count - 1 - options.bad
        total += _most(options, schedule(last, start, True), start is not None)
    return total


def _most(options: Options, places: list[int], given: bool) -> int:
    """Returns the most probes of one side without the bad end, wherever the boundary is."""
    again = 2 if options.verify else 0
    worst = 0 if given else len(places)  # bad to the end
    bad = 0
    for number, good in enumerate(places[:1] if given else places, start=1):
        if good < bad:  # the newest was tried first: if it is bad, no release there is good
            break
        # ceil(log2(good - bad)) halvings between them.
        worst = max(worst, number + (good - bad - 1).bit_length() + again)
        bad = good
    return worst
