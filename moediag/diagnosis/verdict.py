"""The verdict of a trial, from the facts that were found: which, who, why, and how sure.

The verdict, the first rule that applies:

1. ``inconclusive``: the launch never started, or the user interrupted it;
2. ``not-applicable``: a worker says why this trial cannot be done on this stack;
3. ranks raised or died by themselves: ``collective-mismatch`` when their schedules do not fit
   together (or the library says so), else ``crash``; an exception in the program's own code that
   leaves others waiting is the cause, their stall its consequence. Ranks that the guard stopped
   (moediag.recorder.guard) crashed, whatever their schedules would have led to;
4. ``hang``: the watchdog saw quiescent ranks wait in a collective (in evidence of other tools:
   calls did not complete);
5. ``inconclusive``: the time bound ended it without a stall, or a rank left no numbers;
6. ``wrong-weights``: some rank trained other weights than the checkpoint's, or was not sharded as
   asked, or a load delivered other bytes; ``nonfinite``; then what came first: ``wrong-gradients``
   against the reference, whatever the schedules say, or ``replica-divergence``, what must be equal
   on several ranks and is not, or ``wrong-weights``, an optimizer that left other weights, another
   learning rate or count of updates than in one process. A norm that is equal everywhere and wrong
   is ``wrong-gradients`` too: what the optimizer gets is;
   ``wrong-metrics``, where all that trains is right and what is reported of it is not;
7. what a resume trial says in their place: ``resume-drift``, ``inconclusive``, ``clean``;
8. ``clean``: everything compared is right, even where schedules differ (then it is noted).

In evidence of other tools, and of a watched job, nothing is compared: after 5 it is
``collective-mismatch`` when schedules do not fit together, else ``clean`` when all that was
recorded completed.

The confidence:

- high: what the verdict rests on was seen directly, and where ranks are named, by what they did or
  by a strict majority;
- medium: ranks are named by weaker evidence (their history, the largest group, against a majority),
  or none is where one should be, or part of a log was lost;
- low: no schedule and no stack stands behind it (only an error's text), or nothing was decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moediag.diagnosis import applied, cause, disagree, metrics, optimizer, outside
from moediag.diagnosis.align import was_recorded
from moediag.diagnosis.applied import AppliedFacts
from moediag.diagnosis.culprits import Blame
from moediag.diagnosis.diverge import Divergence
from moediag.diagnosis.factor import PATTERN, FactorFacts, sentences
from moediag.diagnosis.failures import GUARD, Failure
from moediag.diagnosis.frontier import Frontier
from moediag.diagnosis.gradients import GradientFacts
from moediag.diagnosis.loads import LoadFacts
from moediag.diagnosis.metrics import MetricFacts
from moediag.diagnosis.ownership import OwnershipFacts
from moediag.diagnosis.parts import Part, sentence
from moediag.diagnosis.replicas import ReplicaFacts
from moediag.diagnosis.resume import ResumeFacts
from moediag.diagnosis.whereabouts import whereabouts
from moediag.evidence.model import UNTOLD, Evidence, RankEvidence
from moediag.report.names import error_size, plural, ranks
from moediag.verdicts import Confidence, Verdict


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
    loads: LoadFacts = field(default_factory=LoadFacts)
    resume: ResumeFacts = field(default_factory=ResumeFacts)
    frontier: Frontier | None = None  # of a foreign job that stands still without a divergence
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
    what: str = ""  # which fact of the replicas, of loads or of a resume explains it


def judge(facts: Facts) -> Judgement:
    """The rules of this module's docstring, in their order."""
    evidence = facts.evidence
    if evidence.interrupted:
        return _undecided("The run was interrupted before it ended.")
    reasons = {
        seen.outcome.applicable: None
        for seen in evidence.ranks.values()
        if seen.outcome is not None and seen.outcome.applicable
    }
    if reasons:
        return Judgement(Verdict.NOT_APPLICABLE, Confidence.HIGH, "; ".join(reasons))
    if evidence.launch_error and not any(map(was_recorded, evidence.ranks.values())):
        return _undecided(f"The ranks did not start: {evidence.launch_error}")
    if facts.failed:
        return _failed(facts)
    if evidence.stall is not None:
        return _hang(facts)
    if evidence.timed_out:
        return _undecided(
            "The time bound ended the launch, and the ranks were not seen to stand still in a "
            "collective: slow is not hung."
        )
    if evidence.launch_error:
        return _undecided(f"The launcher failed: {evidence.launch_error}")
    if evidence.foreign:
        return _foreign(facts)
    if evidence.watched:
        return _watched(facts)
    if not facts.gradients.measured:
        return _unmeasured(facts)
    return _measured(facts)


# ------------------------------------------------------------------------ ended badly


def _failed(facts: Facts) -> Judgement:
    divergence, own = facts.divergence, facts.own
    if own and own[0].name == GUARD:
        return _guarded(facts, own)
    late = divergence is not None and own and 0 < own[0].time < divergence.time
    # A silent divergence does not end a rank: an exception of the program's own is another
    # failure, and an abort by the library its later consequence (sizes came to differ too).
    unfit = divergence is not None and divergence.kind != "missing" and not late
    if unfit and (facts.loud or not own):
        return _mismatch(facts)
    if own:
        return _crash(facts, own)
    if divergence is not None:
        return _mismatch(facts)
    if any(f.mismatch for f in facts.failed):
        return Judgement(
            Verdict.COLLECTIVE_MISMATCH,
            Confidence.LOW,
            f"{ranks(f.rank for f in facts.failed if f.mismatch).capitalize()}: the communication "
            f"library says that collectives did not match ({_said(facts.failed)}). "
            "No recorded schedule shows which.",
        )
    some = facts.failed[0]
    return Judgement(
        Verdict.CRASH,
        Confidence.LOW,
        f"{ranks(f.rank for f in facts.failed).capitalize()} lost the connection to a peer "
        f"({_said(facts.failed)}); nothing seen tells why, or which rank is at fault.",
        failure=some,
    )


def _mismatch(facts: Facts) -> Judgement:
    assert facts.divergence is not None
    text = cause.of_divergence(facts.divergence, facts.blame, facts.evidence.backend, died=True)
    if facts.divergence.silent:
        text += cause.out_of_step(facts.evidence, sorted(facts.evidence.ranks))
    text += cause.called_at(facts.divergence, facts.blame, facts.evidence, text)
    return Judgement(
        Verdict.COLLECTIVE_MISMATCH,
        _confidence(facts),
        text,
        culprits=facts.blame.culprits,
        victims=_others(facts),
        divergence=True,
    )


def _guarded(facts: Facts, own: tuple[Failure, ...]) -> Judgement:
    """The guard raised on ranks that had not yet done what the divergence would have led to."""
    raised = [f for f in own if f.name == GUARD]
    who = ranks(f.rank for f in raised)
    if facts.divergence is None:
        text = f"The guard stopped {who}: {raised[0].summary}"
        return Judgement(Verdict.CRASH, Confidence.MEDIUM, text, failure=raised[0])
    backend = facts.evidence.backend
    text = cause.of_divergence(facts.divergence, facts.blame, backend, died=False, guarded=True)
    earlier = any(c is not None and c.op == "all_gather" for c in facts.divergence.calls.values())
    when = "at the next reduction" if earlier else "before that reduction"
    return Judgement(
        Verdict.CRASH,
        _confidence(facts),
        f"{text} The guard stopped {who} {when} ({GUARD}).",
        culprits=facts.blame.culprits,
        victims=_others(facts),
        divergence=True,
        failure=raised[0],
    )


def _crash(facts: Facts, own: tuple[Failure, ...]) -> Judgement:
    """All ranks that failed in the same way are culprits: none of them is another's victim."""
    first = own[0]
    same = tuple(sorted(f.rank for f in own if (f.name, f.where) == (first.name, first.where)))
    text = f"{ranks(same).capitalize()} "
    if first.message or first.where:
        text += f"raised {first.name}" + (f" at {first.where}" if first.where else "")
        text += f": {first.summary}" if first.summary else ""
    elif first.name.startswith("exit code"):
        text += f"ended with {first.name} and left no exception"
    elif first.name == UNTOLD:
        text += "ended without a trace (killed, or by os._exit: what started it does not tell)"
    else:
        text += f"died by {first.name}"
        text += _killed(facts.evidence) if first.name == "SIGKILL" else ""
    text = text if text.endswith("!") else text.rstrip(".") + "."
    mixture = optimizer.of_crash(facts.evidence, own)
    text += f" {mixture}" if mixture else ""
    d = facts.divergence
    missing = d is not None and d.kind == "missing" and bool(set(d.absent) & set(same))
    if missing and d is not None:
        calls = {rank: call for rank, call in d.calls.items() if call is not None}
        where = cause.describe(next(iter(calls.values())))
        text += f" {ranks(calls).capitalize()} then waited in {where} on {d.group.label}."
    others = tuple(sorted(set(facts.evidence.ranks) - set(same)))
    return Judgement(
        Verdict.CRASH,
        Confidence.HIGH if first.message or first.where or missing else Confidence.MEDIUM,
        text,
        culprits=same,
        victims=others,
        divergence=missing,
        failure=first,
    )


def _killed(evidence: Evidence) -> str:
    kills = evidence.oom_kills
    if kills:
        times = "once" if kills == 1 else f"{kills} times"
        return f" (out of memory: the kernel's OOM killer struck {times} meanwhile)"
    if kills == 0:
        return " (killed from outside: the kernel's OOM killer did not strike)"
    return " (killed from outside, or out of memory)"


def _said(failed: tuple[Failure, ...]) -> str:
    told = next((f for f in failed if f.summary), failed[0])
    return f"{told.name}: {told.summary}" if told.summary else told.name


# ------------------------------------------------------------------------ stood still


def _hang(facts: Facts) -> Judgement:
    evidence, divergence = facts.evidence, facts.divergence
    assert evidence.stall is not None
    waiting, elsewhere = evidence.stall.waiting, evidence.stall.elsewhere
    if not waiting:
        return _undecided(
            f"{ranks(elsewhere).capitalize()} stood still, but not in a collective: no hang of "
            "communication."
        )
    if divergence is not None:
        text = cause.of_divergence(divergence, facts.blame, evidence.backend, died=False)
        if divergence.silent:
            text += cause.out_of_step(evidence, waiting)
        text += cause.called_at(divergence, facts.blame, evidence, text)
        culprits = facts.blame.culprits
        if divergence.kind == "missing":
            text = f"{text} {whereabouts(evidence, culprits)}".rstrip()
        if evidence.foreign and not culprits:
            text += outside.to_collect(evidence)
        return Judgement(
            Verdict.HANG,
            _confidence(facts),
            text,
            culprits=culprits,
            victims=_others(facts),
            divergence=True,
        )
    if facts.frontier is not None:
        return _standing(facts, facts.frontier)
    few = not evidence.foreign or (len(elsewhere) < len(waiting) and not _any_calls(evidence))
    if elsewhere and few:
        return Judgement(
            Verdict.HANG,
            Confidence.MEDIUM,
            f"{ranks(elsewhere).capitalize()} stood still outside any collective while "
            f"{ranks(waiting)} waited. {whereabouts(evidence, elsewhere)}".rstrip(),
            culprits=tuple(sorted(elsewhere)),
            victims=tuple(sorted(waiting)),
        )
    seen = any(evidence.ranks[r].collectives for r in waiting if r in evidence.ranks)
    lost = _unrecorded(evidence)
    text = f"{ranks(waiting).capitalize()} waited in a collective. "
    if seen and not lost:
        text += (
            "The schedules agree as far as they were recorded: no rank is at fault, the operation "
            "itself did not complete (network, backend, or a call that the recorder cannot see)."
        )
    else:
        whose = f" of {ranks(lost)}" if seen else ""
        text += f"No schedule{whose} was recorded, so nothing tells which rank is at fault."
    confidence = Confidence.MEDIUM if seen and not lost else Confidence.LOW
    return Judgement(Verdict.HANG, confidence, text, victims=tuple(sorted(waiting)))


def _standing(facts: Facts, found: Frontier) -> Judgement:
    """A job of somebody else, whose schedules agree as far as they were seen."""
    text, evidence = outside.of_frontier(found, facts.evidence), facts.evidence
    if found.basis != "device" or not found.suspects:
        text += outside.to_collect(evidence)
    strong = found.basis in ("device", "unseen", "none") and found.call is not None
    return Judgement(
        Verdict.HANG,
        Confidence.MEDIUM if strong else Confidence.LOW,
        text,
        culprits=found.suspects,
        victims=tuple(sorted(set(evidence.ranks) - set(found.suspects))) if found.suspects else (),
        what="stuck",
    )


# ------------------------------------------------------------------------ reached the end


def _foreign(facts: Facts) -> Judgement:
    """A job of somebody else that is not known to stand still, and of which nothing failed."""
    evidence, divergence = facts.evidence, facts.divergence
    if divergence is not None and divergence.kind != "missing":
        return _mismatch(facts)
    calls = [call for seen in evidence.ranks.values() for call in seen.collectives]
    if not calls:
        return _undecided(
            "Nothing that was found shows a failure, and no schedule shows that there is none."
            + outside.to_collect(evidence)
        )
    if any(not call.completed for call in calls):
        return _undecided("Calls were on their way when this was recorded.")
    text, whole = outside.of_records(evidence)
    return Judgement(Verdict.CLEAN, Confidence.MEDIUM if whole else Confidence.LOW, text)


def _watched(facts: Facts) -> Judgement:
    """A job that ended by itself, and none of whose ranks failed. What it computed is not known."""
    evidence, divergence = facts.evidence, facts.divergence
    if divergence is not None and divergence.kind != "missing":
        return _mismatch(facts)
    recorded = [rank for rank, seen in sorted(evidence.ranks.items()) if was_recorded(seen)]
    if not recorded:
        return _undecided("No rank was recorded, so nothing is known of this job.")
    lost = [r for r in recorded if not _ended_well(evidence.ranks[r])]
    if lost:
        return _undecided(f"How {ranks(lost)} ended is not known.")
    steps = max(evidence.ranks[rank].last_step for rank in recorded)
    text = f"{ranks(recorded).capitalize()} ended in peace after {plural(steps, 'step')}, never "
    text += "stood still, and their schedules agree as far as they are kept. Nothing was measured."
    unknown = _unrecorded(evidence)
    if unknown:
        text += f" Of {ranks(unknown)} nothing was recorded."
    return Judgement(Verdict.CLEAN, Confidence.MEDIUM if unknown else Confidence.HIGH, text)


def _ended_well(seen: RankEvidence) -> bool:
    return seen.finished or (seen.exit is not None and seen.exit.code == 0)


def _unmeasured(facts: Facts) -> Judgement:
    silent = [r for r, seen in sorted(facts.evidence.ranks.items()) if seen.outcome is None]
    who = ranks(silent).capitalize() if silent else "Not every rank"
    return _undecided(f"{who} left no measurements, and no error that says why.")


def _measured(facts: Facts) -> Judgement:
    numbers, divergence = facts.gradients, facts.divergence
    if facts.loads.wrong:
        text = "; ".join(facts.loads.wrong) + ". The method is at fault, no rank is."
        what = f"loaded by {', '.join(facts.loads.methods)}"
        return Judgement(Verdict.WRONG_WEIGHTS, Confidence.HIGH, text, what=what)
    if facts.loads.loads:
        return Judgement(Verdict.CLEAN, Confidence.HIGH, facts.loads.summary)
    blamed = facts.blame
    if facts.ownership.wrong:
        return _wrong_weights(facts)
    if numbers.nonfinite:
        name = numbers.nonfinite
        return Judgement(
            Verdict.NONFINITE,
            Confidence.HIGH,
            f"On {ranks(numbers.nonfinite_ranks)} {name}.",
            culprits=_few(numbers.nonfinite_ranks, facts.evidence),
        )
    resumed = facts.resume
    if resumed.verdict is not None:
        return Judgement(resumed.verdict, resumed.confidence, resumed.text, what=resumed.pattern)
    earlier = _applied(facts) or _replicas(facts)
    if earlier is not None:
        return earlier
    if numbers.wrong or any(part.wrong for part in facts.parts):
        text = _gradients(facts)
        culprits: tuple[int, ...] = ()
        lost = _unrecorded(facts.evidence)
        if divergence is not None:
            why = cause.of_divergence(divergence, blamed, facts.evidence.backend, died=False)
            text, culprits = f"{why} {text}", blamed.culprits
        elif lost:
            text += f" No schedule of {ranks(lost)} was recorded: whether a rank is at fault is not"
            text += " known."
        elif facts.replicas.first is not None:
            text += f" {disagree.of_replicas(facts.replicas)}"
        else:
            text += " The schedules agree: no rank is at fault, all compute the same wrong thing."
        certain = Confidence.MEDIUM if lost else Confidence.HIGH
        return Judgement(
            Verdict.WRONG_GRADIENTS,
            _confidence(facts) if divergence is not None else certain,
            text,
            culprits=culprits,
            victims=tuple(sorted(set(numbers.ranks) - set(culprits))) if culprits else (),
            divergence=divergence is not None,
            what=_what(facts) if divergence is None else "",
        )
    if facts.metrics.step is not None:
        text = metrics.sentence(facts.metrics)
        pattern = facts.metrics.pattern
        return Judgement(Verdict.WRONG_METRICS, Confidence.HIGH, text, what=pattern)
    notes: tuple[str, ...] = ()
    if divergence is not None:
        why = cause.of_divergence(divergence, blamed, facts.evidence.backend, died=False)
        notes = (f"the schedules differ, although the result is right: {why}",)
    if numbers.compared:
        text = f"{plural(numbers.compared, 'gradient')} as in the reference on every rank, largest "
        text += f"error {error_size(numbers.error)}."
        if facts.ownership.seen:
            text += f" {facts.ownership.experts} experts of each layer where they belong."
        confidence = Confidence.MEDIUM if divergence is not None else Confidence.HIGH
        return Judgement(Verdict.CLEAN, confidence, text, notes=notes)
    if any(
        seen.outcome is not None and seen.outcome.cost for seen in facts.evidence.ranks.values()
    ):
        return Judgement(Verdict.CLEAN, Confidence.LOW, "Only timed; nothing was compared.")
    return _undecided("Every rank reached its end, but no gradient was compared with a reference.")


def _gradients(facts: Facts) -> str:
    """Which are wrong, and where in the model."""
    count = cause.of_gradients(facts.gradients) if facts.gradients.wrong else ""
    return " ".join(filter(None, (count, sentence(facts.parts), sentences(facts.factors))))


def _what(facts: Facts) -> str:
    """The word for wrong gradients that no divergence of schedules explains."""
    if facts.factors.complete:
        return PATTERN
    return "replicas differ" if facts.replicas.found else ""


def _wrong_weights(facts: Facts) -> Judgement:
    """No rank is at fault where the library lost experts on all of them."""
    numbers, held = facts.gradients, facts.ownership
    text = held.text
    if numbers.wrong:
        text += f" {_gradients(facts)}"
    elif numbers.compared:
        text += f" {plural(numbers.compared, 'gradient')} as in the reference all the same."
    return Judgement(
        Verdict.WRONG_WEIGHTS, Confidence.HIGH, text, culprits=_few(held.ranks, facts.evidence)
    )


def _first_wrong(facts: Facts) -> int | None:
    """The first step with a wrong gradient."""
    of_inputs = 1 if any(part.wrong for part in facts.parts) else None
    return facts.gradients.step if facts.gradients.step is not None else of_inputs


def _applied(facts: Facts) -> Judgement | None:
    """What the optimizer left is wrong after a step whose gradients were right and in which
    replicas agreed."""
    found, first, wrong = facts.applied, facts.replicas.first, _first_wrong(facts)
    if found.step is None or (wrong is not None and wrong <= found.step):
        return None
    if first is not None and first.step <= found.step:
        return None
    text = applied.sentence(found)
    who = _few(found.ranks, facts.evidence)
    return Judgement(Verdict.WRONG_WEIGHTS, Confidence.HIGH, text, who, what=found.what)


def _replicas(facts: Facts) -> Judgement | None:
    """What must be equal and is not, or a norm that is wrong, before any gradient was wrong."""
    first, norm, wrong = facts.replicas.first, facts.replicas.wrong_norm, _first_wrong(facts)
    if first is not None and (wrong is None or first.step < wrong):
        return Judgement(
            Verdict.REPLICA_DIVERGENCE,
            Confidence.HIGH,
            disagree.of_replicas(facts.replicas),
            culprits=first.culprits,
            victims=tuple(sorted(set(first.ranks) - set(first.culprits))) if first.culprits else (),
            what=first.what,
        )
    if norm is not None and facts.gradients.compared and (wrong is None or norm.step < wrong):
        return Judgement(
            Verdict.WRONG_GRADIENTS,
            Confidence.HIGH,
            disagree.of_wrong_norm(norm),
            what="clipping norm",
        )
    return None


def _few(culprits: tuple[int, ...], evidence: Evidence) -> tuple[int, ...]:
    """Nobody where everybody is: after a reduction a nan is on all ranks alike."""
    return culprits if len(culprits) < evidence.world_size else ()


# ------------------------------------------------------------------------ common


def _undecided(text: str) -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, Confidence.LOW, text)


def _unrecorded(evidence: Evidence) -> list[int]:
    """Ranks whose schedule nobody knows: what they did may be what is wrong."""
    return [rank for rank, seen in sorted(evidence.ranks.items()) if not was_recorded(seen)]


def _others(facts: Facts) -> tuple[int, ...]:
    """Everybody who did not diverge waits for, or dies with, those who did; nobody where it
    cannot be told who did."""
    if not facts.blame.culprits:
        return ()
    return tuple(sorted(set(facts.evidence.ranks) - set(facts.blame.culprits)))


def _confidence(facts: Facts) -> Confidence:
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


def _any_calls(evidence: Evidence) -> bool:
    """Then being elsewhere alone means nothing: somebody must wait for a call of that rank."""
    return any(seen.collectives for seen in evidence.ranks.values())


def _indirect(divergence: Divergence, evidence: Evidence) -> bool:
    """Other tools' dumps tell neither what a device's streams wait for, nor, on gloo, whether a
    rank is in a send or receive; and one cause seldom takes several ranks elsewhere."""
    if not evidence.foreign:
        return False
    doubtful = evidence.backend == "gloo" or len(divergence.absent) > 1
    return divergence.kind == "order" or (divergence.inferred and doubtful)
