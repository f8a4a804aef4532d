"""What was found out about a trial before it is judged, the judgement, and what every rule asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.failures import Failure
from moediag.diagnosis.numbers.by_part import Part
from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.numbers.metrics import MetricFacts
from moediag.diagnosis.numbers.optimizer_update import AppliedFacts
from moediag.diagnosis.numbers.ownership import OwnershipFacts
from moediag.diagnosis.numbers.replicas import ReplicaFacts
from moediag.diagnosis.numbers.resume import ResumeFacts
from moediag.diagnosis.numbers.scale_factor import FactorFacts
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.schedules.device_position import Front
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was found out, before it is judged."""

    evidence: Evidence
    failed: tuple[Failure, ...]
    divergence: Divergence | None
    blame: Blame
    gradients: GradientFacts
    parts: tuple[Part, ...] = ()  # of the first step with a wrong gradient
    ownership: OwnershipFacts = field(default_factory=OwnershipFacts)
    replicas: ReplicaFacts = field(default_factory=ReplicaFacts)
    resume: ResumeFacts = field(default_factory=ResumeFacts)
    frontier: Frontier | None = None  # of a job that stands still without a divergence
    fronts: tuple[Front, ...] = ()  # of ranks whose devices are known
    factors: FactorFacts = field(default_factory=FactorFacts)
    applied: AppliedFacts = field(default_factory=AppliedFacts)
    metrics: MetricFacts = field(default_factory=MetricFacts)

    @property
    def loud(self) -> bool:
        """Calls that do not fit together and that a library can notice; a missing call is none."""
        d = self.divergence
        return d is not None and not d.silent and d.kind not in ("missing", "order")

    @property
    def own(self) -> tuple[Failure, ...]:
        """Failures that no other rank explains."""
        return tuple(f for f in self.failed if not f.consequence)


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    confidence: Confidence
    cause: str
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    divergence: bool = False  # the first divergence explains it
    failure: Failure | None = None  # the exception or signal that explains it
    notes: tuple[str, ...] = ()
    what: str = ""  # which fact of the replicas or of a resume explains it


def few(culprits: tuple[int, ...], evidence: Evidence) -> tuple[int, ...]:
    """Nobody where everybody is: after a reduction a nan is on all ranks alike."""
    return culprits if len(culprits) < evidence.world_size else ()


def undecided(text: str) -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, Confidence.LOW, text)


def unrecorded(evidence: Evidence) -> list[int]:
    """Ranks whose schedule nobody knows: what they did may be what is wrong."""
    return [rank for rank, seen in sorted(evidence.ranks.items()) if not was_recorded(seen)]


def others(facts: Facts) -> tuple[int, ...]:
    """Everybody who did not diverge waits for, or dies with, those who did; nobody where it
    cannot be told who did."""
    if not facts.blame.culprits:
        return ()
    return tuple(sorted(set(facts.evidence.ranks) - set(facts.blame.culprits)))


def how_sure(facts: Facts) -> Confidence:
    """Of a verdict that rests on the first divergence."""
    found = facts.blame
    if found.contradicted or not found.culprits or found.basis in ("history", "plurality", "habit"):
        return Confidence.MEDIUM
    if found.basis == "gone" and facts.divergence is not None and len(facts.divergence.calls) == 2:
        return Confidence.MEDIUM  # one against one: the other may have called once too often
    if facts.divergence is not None and _indirect(facts.divergence, facts.evidence):
        return Confidence.MEDIUM
    complete = all(
        was_recorded(seen) and not any("unreadable" in text for text in seen.not_seen)
        for seen in facts.evidence.ranks.values()
    )
    return Confidence.HIGH if complete else Confidence.MEDIUM


def any_calls(evidence: Evidence) -> bool:
    """Then being elsewhere alone means nothing: somebody must wait for a call of that rank."""
    return any(seen.collectives for seen in evidence.ranks.values())


def _indirect(divergence: Divergence, evidence: Evidence) -> bool:
    """Other tools' dumps tell neither what a device's streams wait for, nor, on gloo, whether a
    rank is in a send or receive; and one cause seldom takes several ranks elsewhere."""
    if not evidence.foreign:
        return False
    doubtful = evidence.backend == "gloo" or len(divergence.absent) > 1
    return divergence.kind == "order" or (divergence.inferred and doubtful)
