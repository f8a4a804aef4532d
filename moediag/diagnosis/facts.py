"""The facts of one trial that detectors and tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moediag.diagnosis.blame import decisions
from moediag.diagnosis.blame.culprits import Blame, blame, by_usual_order, independent
from moediag.diagnosis.blame.decisions import Parted
from moediag.diagnosis.blame.excuses import excuse
from moediag.diagnosis.blame.forks import Fork, fork
from moediag.diagnosis.blame.nodes import ranks_of, silent
from moediag.diagnosis.blame.received import Origin, origin
from moediag.diagnosis.blame.standings import Standing, by_condition, standings
from moediag.diagnosis.end_states.failures import Failure, failures
from moediag.diagnosis.numbers import by_part
from moediag.diagnosis.numbers.by_part import Part
from moediag.diagnosis.numbers.gradients import GradientFacts, gradient_facts
from moediag.diagnosis.numbers.metrics import MetricFacts, metric_facts
from moediag.diagnosis.numbers.optimizer_update import AppliedFacts, applied_facts
from moediag.diagnosis.numbers.ownership import OwnershipFacts, ownership_facts
from moediag.diagnosis.numbers.replicas import ReplicaFacts, replica_facts
from moediag.diagnosis.numbers.resume import ResumeFacts, resume_facts
from moediag.diagnosis.numbers.scale_factor import FactorFacts, factor_facts
from moediag.diagnosis.schedules import device_frontier, surplus, transfers
from moediag.diagnosis.schedules.align import Aligned, align, was_recorded
from moediag.diagnosis.schedules.device_frontier import Front
from moediag.diagnosis.schedules.diverge import Divergence, divergences
from moediag.diagnosis.schedules.log_positions import Positions, positions
from moediag.diagnosis.schedules.replay import replay
from moediag.diagnosis.schedules.starvation import tokens_of
from moediag.diagnosis.schedules.stuck_calls import Frontier, frontier
from moediag.evidence.model import Evidence

if TYPE_CHECKING:
    from moediag.protocol import Outcome

T = TypeVar("T")


class Facts:
    """Facts that several detectors or tables use, each computed on first use.

    A detector that alone needs a fact computes it from ``evidence``."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._known: dict[Callable[[Evidence], Any], Any] = {}

    def of(self, compute: Callable[[Evidence], T]) -> T:
        """``compute(evidence)``, computed once: a fact that the detectors or laws of one module
        share."""
        if compute not in self._known:
            self._known[compute] = compute(self.evidence)
        return cast("T", self._known[compute])

    # -- how ranks ended ---------------------------------------------------------------

    @cached_property
    def failed(self) -> tuple[Failure, ...]:
        """Ranks that failed by themselves, the first one first."""
        return failures(self.evidence)

    @property
    def own(self) -> tuple[Failure, ...]:
        """Failures that no other rank explains."""
        return tuple(f for f in self.failed if not f.consequence)

    @cached_property
    def origins(self) -> Mapping[int, Origin]:
        """Ranks whose own failure may only show what other ranks sent them, with the call by which
        they received it."""
        of = self.own if self.evidence.sources else ()
        return {f.rank: call for f in of if (call := origin(f, self.evidence)) is not None}

    @cached_property
    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks of nodes that stopped sending."""
        return ranks_of(silent(self.evidence))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that the watchdog saw waiting in a collective, without those of silent nodes."""
        stall = self.evidence.stall
        return tuple(r for r in stall.waiting if r not in self.silent_ranks) if stall else ()

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks that the watchdog saw outside any collective, without those of silent nodes."""
        stall = self.evidence.stall
        return tuple(r for r in stall.elsewhere if r not in self.silent_ranks) if stall else ()

    @property
    def unrecorded(self) -> list[int]:
        """Ranks without a known schedule: their calls may be what is wrong."""
        seen = sorted(self.evidence.ranks.items())
        return [rank for rank, one in seen if not was_recorded(one)]

    # -- schedules ---------------------------------------------------------------------

    @cached_property
    def aligned(self) -> Aligned:
        return align(self.evidence)

    @cached_property
    def _candidates(self) -> tuple[Divergence, ...]:
        replayed = replay(self.aligned, self.evidence)
        found = divergences(self.aligned, replayed, self.evidence, self.failed)
        if self.evidence.watched:
            found = self._transfers(found)
            return tuple(surplus.before(one, self.aligned, self.evidence) for one in found)
        return found

    def _transfers(self, found: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
        """``found``, or the transfer that departs from those of other ranks, if that names nobody:
        for a peer that is wrong by what calls met, for a count by what was usual as well."""
        tokens = tokens_of(self.evidence)
        named = [blame(one, tokens) for one in found]
        if any(one.culprits for one in named):
            return found
        told = transfers.misaddressed(self.aligned, self.evidence)
        pairs = zip(found, named, strict=True)
        if told is None and not any(
            by_usual_order(one, who, self.evidence).basis in ("majority", "peers")
            for one, who in pairs
        ):
            told = transfers.miscounted(self.aligned, self.evidence) or next(
                filter(None, (transfers.left_out(one, self.evidence) for one in found)), None
            )
        return found if told is None else (told,)

    @property
    def divergence(self) -> Divergence | None:
        """Where the ranks' schedules first diverge."""
        return next(iter(self._candidates), None)

    @cached_property
    def diverging(self) -> tuple[tuple[Divergence, Blame], ...]:
        """The first divergence, and in evidence of other tools all that are independent of it,
        with the ranks that diverged there and the rule that named them."""
        return independent(self._candidates, self._blame)

    @property
    def blame(self) -> Blame:
        """Which ranks diverged first, and the rule that named them."""
        return next((found for _, found in self.diverging), Blame())

    def _blame(self, d: Divergence) -> Blame:
        found = by_usual_order(d, blame(d, tokens_of(self.evidence)), self.evidence)
        forked = self.fork if d is self.divergence else None
        found = by_condition(found, d, self.standings, self.evidence, forked)
        told = excuse(found, d, forked, self.evidence)
        return Blame(excuse=told) if told else found

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Where the ranks of a user's job are in the user's code."""
        return standings(self.evidence, self.divergence)

    @cached_property
    def fork(self) -> Fork | None:
        """Where two groups of ranks took different paths through the user's source."""
        found = self.divergence
        return None if found is None else fork(found, self.aligned, self.evidence)

    @property
    def diverged(self) -> tuple[int, ...]:
        """The culprits of all divergences."""
        return tuple(sorted({rank for _, found in self.diverging for rank in found.culprits}))

    @property
    def loud(self) -> bool:
        """Whether a library can notice the first divergence; it cannot notice a missing call."""
        d = self.divergence
        return d is not None and not d.silent and d.kind not in ("missing", "order")

    @cached_property
    def frontier(self) -> Frontier | None:
        """The calls that do not complete in a job that hangs without a divergence."""
        return self.stuck if self.divergence is None else None

    @cached_property
    def stuck(self) -> Frontier | None:
        """The calls that all members made and that do not complete, in a job that hangs."""
        if self.evidence.stall is None or not _by_devices(self.evidence):
            return None
        return frontier(self.aligned, self.evidence)

    @property
    def under_way(self) -> bool:
        """Whether the calls that did not complete may just have been under way: nothing shows how
        long ranks waited, and no rank is known that they wait for. Only NCCL writes dumps by
        itself, after a timeout; one written on request has the same content. On gloo, or if dumps
        were written just after their newest call, a person chose the moment: a rank may have been
        late."""
        stall = self.evidence.stall
        if stall is None or stall.certain:
            return False
        if self.divergence is not None:
            late = self.evidence.backend == "gloo" or stall.at_once or not self.diverged
            return late and all(one.kind == "missing" for one, _ in self.diverging)
        return self.frontier is None or not (
            self.frontier.basis == "unseen" and self.frontier.suspects
        )

    @cached_property
    def fronts(self) -> tuple[Front, ...]:
        """Where Python and the device are, for ranks whose devices are known."""
        return device_frontier.fronts(self.evidence)

    @cached_property
    def positions(self) -> Positions | None:
        """Where ranks are by messages of watchdogs; None where calls were recorded."""
        if any(seen.collectives for seen in self.evidence.ranks.values()):
            return None
        return positions(self.evidence.reports)

    @cached_property
    def decisions(self) -> tuple[Parted, ...]:
        """Decisions on which ranks differed."""
        return decisions.parted(self.evidence)

    # -- numbers -----------------------------------------------------------------------

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What ranks measured and reported, of those that reached their end."""
        every = (seen.outcome for seen in self.evidence.ranks.values())
        return tuple(outcome for outcome in every if outcome is not None)

    @cached_property
    def gradients(self) -> GradientFacts:
        return gradient_facts(self.evidence)

    @cached_property
    def compared_step(self) -> int | None:
        """The step whose gradients, or else whose block inputs, are shown part by part."""
        return self.gradients.step or by_part.wrong_inputs(self.evidence)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Gradients of the compared step by part of the model."""
        step = self.compared_step
        return by_part.parts(self.evidence, step) if step is not None else ()

    @property
    def first_wrong(self) -> int | None:
        """The first step with a wrong gradient."""
        of_inputs = 1 if any(part.wrong for part in self.parts) else None
        return self.gradients.step if self.gradients.step is not None else of_inputs

    @cached_property
    def factors(self) -> FactorFacts:
        return factor_facts(self.evidence, self.compared_step)

    @cached_property
    def ownership(self) -> OwnershipFacts:
        return ownership_facts(self.evidence)

    @cached_property
    def replicas(self) -> ReplicaFacts:
        return replica_facts(self.evidence)

    @cached_property
    def resume(self) -> ResumeFacts:
        return resume_facts(self.evidence)

    @cached_property
    def applied(self) -> AppliedFacts:
        return applied_facts(self.evidence)

    @cached_property
    def metrics(self) -> MetricFacts:
        return metric_facts(self.evidence)


def _by_devices(evidence: Evidence) -> bool:
    """Whether completion shows where the job hangs; not if a rank is known to be elsewhere."""
    if evidence.foreign:
        return True
    return evidence.devices_known and not (evidence.stall and evidence.stall.elsewhere)
