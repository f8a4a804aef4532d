"""The result of a search, by index into the releases (0 is the oldest). Plain data."""

from __future__ import annotations

from dataclasses import field

from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict
from moediag.records import dataclass
from moediag.result import Confidence, Verdict
from moediag.result.verdicts import StrEnum

# Chances that the last good release has the failure unnoticed, above which confidence drops.
LITTLE, MUCH = 0.01, 0.05
LACKING = f"{Verdict.NOT_APPLICABLE}:"  # prefix of the reason of such a SKIP


class Status(StrEnum):
    FOUND = "found"  # every requested boundary lies between a bad and a good release
    OPEN = "open"  # some boundary has no good release beyond it
    NOT_REPRODUCED = "not-reproduced"  # the bad end is good
    UNDECIDED = "undecided"  # the bad end could not be judged


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where bad meets good."""

    bad: int  # the bad release next to it
    good: int | None  # the good one, or None if no release beyond ``bad`` is good
    limit: int  # the last release on this side of the bad end
    after: bool = False
    # releases between them that were tried, with their verdicts
    undecided: tuple[tuple[int, ProbeVerdict], ...] = ()
    untried: tuple[int, ...] = ()  # releases between them that were not tried
    confirmed: bool = False  # both were probed twice with the same verdict
    missed: float | None = None  # chance that ``good`` has the failure and no trial showed it
    again: tuple[int, ...] = ()  # releases beyond ``good`` that are bad again, unexpectedly

    @property
    def candidates(self) -> tuple[int, ...]:
        """Returns the releases among which the first bad one is (for ``after``: the first good
        one), oldest first; empty if the boundary is open."""
        if self.good is None:
            return ()
        low, high = sorted((self.bad, self.good))
        return tuple(range(low + 1, high + 1))

    @property
    def exact(self) -> bool:
        """Whether bad and good are neighbours."""
        return len(self.candidates) == 1

    @property
    def to_the_end(self) -> bool:
        """Whether it is bad up to the last release on this side."""
        return self.good is None and self.bad == self.limit

    @property
    def since_it_exists(self) -> bool:
        """Whether it is bad since the scenario's requirements exist: the neighbour and every other
        tried release on the older side are not applicable."""
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
    """The whole answer."""

    status: Status
    end: int  # the bad end and its verdict
    end_verdict: ProbeVerdict
    began: Boundary | None = None  # the boundary with older good releases, None if not searched
    ended: Boundary | None = None  # the boundary with newer good releases, None if not searched
    # the verdict on the given good release, if that is not GOOD
    given_good: tuple[int, ProbeVerdict] | None = None
    # decided releases that contradict both boundaries, from probes that the search did not need.
    # They depend on timing, so they do not count when answers are compared.
    beside: tuple[tuple[int, Kind], ...] = field(default=(), compare=False)

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return tuple(b for b in (self.began, self.ended) if b is not None)

    @property
    def monotone(self) -> bool:
        """Whether all verdicts fit one stretch of bad releases."""
        return not self.beside and not any(b.again for b in self.boundaries)

    @property
    def confidence(self) -> Confidence:
        """Returns high if each boundary lies between neighbours, both probed twice, and a missed
        failure is less likely than 1 %. Returns low if nothing was found, a release was bad again,
        a neighbour is FLAKY, or a missed failure is more likely than 5 %. Else medium."""
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
