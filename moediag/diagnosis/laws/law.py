"""What a law is: what must hold in every healthy job, by what ranks recorded (`watch --laws`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector, Judgement
from moediag.evidence.law_model import RankLaws
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result import Confidence, Verdict


@dataclass(frozen=True, slots=True)
class Broken:
    """What no healthy program does."""

    cause: str
    """The sentence that explains it."""
    pattern: str
    """The signature's word for it."""
    next_step: str
    """What to change."""
    culprits: tuple[int, ...] = ()
    lasting: bool = False
    """No later step takes it back, so it is said while the job still runs."""
    beside: bool = False
    """It is a note if another failure decides the verdict."""


Findings = Iterator[Broken | str]
"""What is broken, and notes: sentences about what may be deliberate."""


@dataclass(frozen=True, slots=True)
class Law:
    """Looks for what no healthy program does."""

    find: Callable[[Facts], Findings]
    """Its docstring says when the law is broken."""
    verdict: Verdict | None
    """The verdict on a job that breaks it; None if all that it finds may be deliberate."""

    def broken(self, facts: Facts) -> Broken | None:
        """The first thing that is broken."""
        return next((one for one in self.find(facts) if isinstance(one, Broken)), None)

    def notes(self, facts: Facts) -> tuple[str, ...]:
        return tuple(one for one in self.find(facts) if isinstance(one, str))


def law(verdict: Verdict | None = None) -> Callable[[Callable[[Facts], Findings]], Law]:
    """Makes a law of a function."""
    return lambda find: Law(find, verdict)


def detector_of(law: Law, verdict: Verdict) -> Detector:
    """The detector of what breaks ``law``."""

    @functools.wraps(law.find)
    def judge(facts: Facts) -> Judgement | None:
        found = law.broken(facts)
        if found is None:
            return None
        return Judgement(
            Confidence.HIGH,
            found.cause,
            culprits=found.culprits,
            pattern=f"law {found.pattern}",
            next_step=found.next_step,
        )

    return Detector(verdict, judge)


def recorded(evidence: Evidence) -> dict[int, RankLaws]:
    """What each rank recorded, of those that recorded for the laws."""
    return {r: seen.laws for r, seen in sorted(evidence.ranks.items()) if seen.laws is not None}
