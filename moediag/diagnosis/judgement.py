"""What a detector is, its judgement, and the helpers that detectors share."""

from __future__ import annotations

from collections.abc import Callable

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words import cause, places
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result import Confidence, Place, Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """A detector's judgement of the fact that it found."""

    confidence: Confidence
    cause: str
    """The sentence that explains the fact."""
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    divergence: bool = False
    """The first divergence explains the fact."""
    failure: Failure | None = None
    """The exception or signal that explains the fact."""
    notes: tuple[str, ...] = ()
    pattern: str = ""
    """The signature's word for what happened, where no divergence or failure explains it."""
    until: int | None = None
    """The step in which it shows; later decisions do not explain it. None: any decision may."""
    next_step: str = ""
    """What to do next, where the detector knows it better than `words/next_step.py`."""
    places: tuple[Place, ...] = ()
    """Where in the program it begins, if not where ranks stand."""
    gradients: bool = False
    """Gradients are wrong because of it, so their parameters are listed."""


@dataclass(frozen=True, slots=True)
class Detector:
    """Looks for one fact that decides the verdict."""

    verdict: Verdict
    """The verdict that the fact leads to."""
    judge: Callable[[Facts], Judgement | None]
    """The judgement of the fact; None if it is absent or unknown. Its docstring says what it
    finds."""

    @property
    def name(self) -> str:
        return self.judge.__name__

    @property
    def finds(self) -> str:
        """One or two sentences."""
        return " ".join((self.judge.__doc__ or "").split())

    @property
    def file(self) -> str:
        """The module that it is in, relative to the repository."""
        return self.judge.__module__.replace(".", "/") + ".py"

    @property
    def is_law(self) -> bool:
        """Whether it checks a law of watched jobs."""
        return "/laws/" in self.file


def detector(verdict: Verdict) -> Callable[[Callable[[Facts], Judgement | None]], Detector]:
    """Makes a detector that leads to ``verdict`` of a function."""
    return lambda judge: Detector(verdict, judge)


def undecided(text: str, next_step: str = "") -> Judgement:
    """An inconclusive judgement because of ``text``."""
    return Judgement(Confidence.LOW, text, next_step=next_step)


def few(culprits: tuple[int, ...], evidence: Evidence) -> tuple[int, ...]:
    """The culprits, or () if all ranks are: after a reduction, a nan is on every rank."""
    return culprits if len(culprits) < evidence.world_size else ()


def apart(ranks: tuple[int, ...], culprits: tuple[int, ...]) -> tuple[int, ...]:
    """``ranks`` without the culprits; () if no culprit is known."""
    return tuple(sorted(set(ranks) - set(culprits))) if culprits else ()


def victims(facts: Facts) -> tuple[int, ...]:
    """All ranks that did not diverge: they wait for the culprits or die with them. In evidence of
    other tools only those that wait."""
    everyone = facts.waiting if facts.evidence.foreign else tuple(facts.evidence.ranks)
    return apart(everyone, facts.diverged)


def told_divergence(facts: Facts, found: Divergence, blamed: Blame, *, died: bool) -> str:
    """The sentences about a divergence: what differs, the lines of the calls, and what the first
    one's conditions held on each rank. ``died``: the job ended."""
    evidence = facts.evidence
    text = cause.of_divergence(found, blamed, evidence.backend, died=died)
    if found.silent:
        text += cause.out_of_step(evidence, sorted(evidence.ranks) if died else facts.waiting)
    text += cause.called_at(found, blamed, evidence, text)
    if found is facts.divergence:
        text += places.sentences(facts.standings, facts.fork, evidence)
    return text


def how_sure(facts: Facts) -> Confidence:
    """The confidence of a verdict that rests on divergences: on the least certain one."""
    return min((_sure(facts, *both) for both in facts.diverging),
               key=(Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH).index)  # fmt: skip


def unseen(evidence: Evidence) -> Confidence:
    """The highest confidence that evidence of other tools allows: it falls with what is unseen."""
    if not evidence.foreign:
        return Confidence.HIGH
    known = sum(map(was_recorded, evidence.ranks.values()))
    if 2 * known <= evidence.world_size:
        return Confidence.LOW
    certain = evidence.stall is not None and evidence.stall.certain
    return Confidence.HIGH if certain and known == evidence.world_size else Confidence.MEDIUM


_WEAK = ("peers", "condition")  # what names ranks less than surely


def _sure(facts: Facts, divergence: Divergence, found: Blame) -> Confidence:
    if found.basis == "habit":
        return Confidence.LOW  # what a job always did before is a hint
    if (limit := unseen(facts.evidence)) != Confidence.HIGH:
        return limit
    if found.contradicted or not found.culprits or found.basis in _WEAK:
        return Confidence.MEDIUM
    if found.basis == "gone" and 2 * len(divergence.absent) == len(divergence.calls):
        return Confidence.MEDIUM  # as many against as many: the others may have made an extra call
    if _indirect(divergence, facts.evidence):
        return Confidence.MEDIUM
    complete = all(
        was_recorded(seen) and not any("unreadable" in text for text in seen.not_seen)
        for seen in facts.evidence.ranks.values()
    )
    return Confidence.HIGH if complete else Confidence.MEDIUM


def _indirect(divergence: Divergence, evidence: Evidence) -> bool:
    """Whether the evidence is indirect. Other tools' dumps do not show what a device's streams wait
    for, nor, on gloo, whether a rank is in a send or receive. One cause seldom takes several ranks
    elsewhere."""
    if not evidence.foreign:
        return False
    doubtful = evidence.backend == "gloo" or len(divergence.absent) > 1
    return divergence.kind == "order" or (divergence.inferred and doubtful)
