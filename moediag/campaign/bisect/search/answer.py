"""What a search found, by index into the releases (0 is the oldest). Plain data, nothing prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from moediag.campaign.bisect.probe_verdict import Kind, ProbeVerdict
from moediag.result import Confidence, Verdict
from moediag.result.verdicts import StrEnum

# Chances that the last good release is bad and was missed, above which an answer is worth less.
LITTLE, MUCH = 0.01, 0.05
LACKING = f"{Verdict.NOT_APPLICABLE}:"  # how the reason of such a SKIP begins


class Status(StrEnum):
    FOUND = "found"  # every boundary that was looked for lies between a bad and a good release
    OPEN = "open"  # some boundary has no good release beyond it
    NOT_REPRODUCED = "not-reproduced"  # the bad end is good
    UNDECIDED = "undecided"  # the bad end could not be judged


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where bad meets good. ``bad``: the bad release at it. ``good``: the good one, None where no
    release beyond ``bad`` is good. ``undecided``: releases between them that were tried, with what
    they said; ``untried``: those between them that were not. ``limit``: the last release on this
    side of the bad end. ``confirmed``: both were probed twice and said the same; ``missed``: chance
    that ``good`` has the failure and no trial showed it. ``again``: releases beyond ``good`` that
    are bad again, though the search expected none."""

    bad: int
    good: int | None
    limit: int
    after: bool = False
    undecided: tuple[tuple[int, ProbeVerdict], ...] = ()
    untried: tuple[int, ...] = ()
    confirmed: bool = False
    missed: float | None = None
    again: tuple[int, ...] = ()

    @property
    def candidates(self) -> tuple[int, ...]:
        """The first bad release is one of these (``after``: the first good one), oldest first;
        empty where the boundary is open."""
        if self.good is None:
            return ()
        low, high = sorted((self.bad, self.good))
        return tuple(range(low + 1, high + 1))

    @property
    def exact(self) -> bool:
        """Bad and good are neighbours."""
        return len(self.candidates) == 1

    @property
    def to_the_end(self) -> bool:
        """It is bad up to the last release there is on this side."""
        return self.good is None and self.bad == self.limit

    @property
    def since_it_exists(self) -> bool:
        """Bad since there is what the scenario needs: the neighbour and every other release that
        was tried on the older side is not applicable."""
        if self.good is not None or self.after:
            return False
        tried = dict(self.undecided)
        lacking = [v.kind == Kind.SKIP and v.text.startswith(LACKING) for v in tried.values()]
        return self.bad - 1 in tried and all(lacking)

    @property
    def returns(self) -> tuple[tuple[int, int, int], ...]:
        """(bad, good, bad) in order of release, for each release in ``again``."""
        if self.good is None:
            return ()
        found = [sorted((self.bad, self.good, index)) for index in self.again]
        return tuple((a, b, c) for a, b, c in found)


@dataclass(frozen=True, slots=True)
class Answer:
    """``end``: the bad end and what it said. ``began``: the boundary with older good releases;
    ``ended``: with newer ones; None where it was not looked for. ``given_good``: what the release
    that was given as good said, where that is not GOOD. ``beside``: decided releases that fit
    neither boundary, seen by probes that the search itself did not need; they depend on what ran
    at the same time, so they do not count when answers are compared."""

    status: Status
    end: int
    end_verdict: ProbeVerdict
    began: Boundary | None = None
    ended: Boundary | None = None
    given_good: tuple[int, ProbeVerdict] | None = None
    beside: tuple[tuple[int, Kind], ...] = field(default=(), compare=False)

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return tuple(b for b in (self.began, self.ended) if b is not None)

    @property
    def monotone(self) -> bool:
        """Nothing that was seen contradicts one stretch of bad releases."""
        return not self.beside and not any(b.again for b in self.boundaries)

    @property
    def confidence(self) -> Confidence:
        """high: each boundary lies between neighbours, both probed twice, and a missed failure is
        less likely than 1 %. low: nothing was found, a release was bad again, a neighbour is
        FLAKY, or a missed failure is more likely than 5 %. Else medium."""
        if self.status not in (Status.FOUND, Status.OPEN) or not self.monotone:
            return Confidence.LOW
        worst = Confidence.HIGH
        for b in self.boundaries:
            shaky = any(v.kind == Kind.FLAKY for _, v in b.undecided)
            if shaky or (b.missed or 0.0) > MUCH:
                return Confidence.LOW
            sure = b.confirmed and b.exact and (b.missed or 0.0) <= LITTLE
            if not (sure or b.to_the_end or b.since_it_exists):
                worst = Confidence.MEDIUM
        return worst
