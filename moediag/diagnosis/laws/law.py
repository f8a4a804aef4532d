"""What a law is: what must hold in every healthy job, by what ranks recorded (`watch --laws`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Set
from fnmatch import fnmatchcase

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector, Judgement
from moediag.evidence.model import Evidence, recorded
from moediag.records import dataclass
from moediag.result import Confidence, Verdict

__all__ = ["Broken", "Findings", "Law", "Suspicious", "detector_of", "law", "recorded"]


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
    names: tuple[str, ...] = ()
    """The parameters that it is about, if it is about some."""


@dataclass(frozen=True, slots=True)
class Suspicious:
    """What is most often a mistake, and what a healthy program may do on purpose."""

    text: str
    names: tuple[str, ...] = ()
    """The parameters that it is about, if it is about some."""


Findings = Iterator[Broken | Suspicious | str]
"""What is broken, what is suspicious, and notes: sentences about what is often deliberate."""


@dataclass(frozen=True, slots=True)
class Law:
    """Looks for what no healthy program does."""

    find: Callable[[Facts], Findings]
    """Its docstring says when the law is broken."""
    verdict: Verdict | None
    """The verdict on a job that breaks it; None if all that it finds may be deliberate."""
    suspects: bool = False
    """Without a verdict: whether what it finds is suspicious, and not only a note."""

    @property
    def name(self) -> str:
        """The word for it that ``--allow`` and ``moediag explain`` know."""
        return self.find.__name__.replace("_", "-")

    @property
    def finds(self) -> str:
        """What it finds, in words."""
        return " ".join((self.find.__doc__ or "").split())

    def broken(self, facts: Facts) -> Broken | None:
        """The first thing that is broken and not allowed."""
        return next((one for one in self._found(facts) if isinstance(one, Broken)), None)

    def suspicious(self, facts: Facts) -> tuple[str, ...]:
        """What is suspicious and not allowed, with the option that would allow it."""
        return tuple(
            f"{one.text} If intended: --allow {self.name}"
            for one in self._found(facts)
            if isinstance(one, Suspicious)
        )

    def notes(self, facts: Facts) -> tuple[str, ...]:
        return tuple(one for one in self._found(facts) if isinstance(one, str))

    def _found(self, facts: Facts) -> Findings:
        allowed = facts.of(allowances).get(self.name, ())
        for one in self.find(facts):
            names = () if isinstance(one, str) else one.names
            matched = (names and all(fnmatchcase(n, each) for n in names) for each in allowed)
            if "" not in allowed and not any(matched):
                yield one


def allowances(evidence: Evidence) -> Mapping[str, Set[str]]:
    """Laws that the job was allowed to break, each with the patterns of the shell that names of
    parameters must match; "": for all parameters. Written as ``LAW`` or ``LAW:PATTERN``."""
    found: dict[str, set[str]] = {}
    for laws in recorded(evidence).values():
        for name, _, pattern in (text.partition(":") for text in laws.allowed):
            found.setdefault(name, set()).add(pattern)
    return found


def law(
    verdict: Verdict | None = None, suspects: bool = False
) -> Callable[[Callable[[Facts], Findings]], Law]:
    """Makes a law of a function."""
    return lambda find: Law(find, verdict, suspects)


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
