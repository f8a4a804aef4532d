"""From a planned trial and what became of it to its row in result.json."""

from __future__ import annotations

from moediag.errors import StackError
from moediag.judgement import conclusion
from moediag.result.diagnosis import Diagnosis
from moediag.result.run_result import Seconds, TrialResult
from moediag.result.verdicts import Confidence, Verdict
from moediag.scenario.plan import PlannedTrial
from moediag.stacks.environment import Stack


def launched(
    planned: PlannedTrial,
    stack: Stack,
    found: Diagnosis,
    seconds: Seconds,
    evidence: str,
    *,
    other_batch: bool,
) -> TrialResult:
    """``evidence``: the trial's folder, relative to the run directory."""
    trial = planned.trial
    return TrialResult(
        variant=trial.variant,
        role=trial.role,
        stack={**stack.versions, **({"nccl": found.nccl} if found.nccl else {})},
        launcher=trial.launcher,
        backend=trial.backend,
        world_size=trial.world_size,
        shared_gpu=trial.shared_gpu,
        verdict=str(found.verdict),
        expected=_expected(planned),
        met=conclusion.met(planned.expected, found, trial.backend),
        signature=found.signature,
        confidence=str(found.confidence),
        culprits=tuple(found.culprits),
        victims=tuple(found.victims),
        cause=found.cause,
        not_seen=tuple(found.not_seen),
        first_divergence=found.first_divergence,
        gradient_error=found.gradient_error,
        worst_parameter=found.worst_parameter,
        seconds=seconds,
        evidence=evidence,
        repeat=planned.repeat,
        must_show=_must_show(planned),
        repairs=planned.repairs,
        stacks={str(rank): list(frames) for rank, frames in found.stacks.items()},
        wrong_parameters=tuple(found.wrong_parameters),
        parameters_compared=found.parameters_compared,
        notes=_notes(planned, *found.notes, *stack.notes),
        other_batch=other_batch,
        tables=tuple(found.tables),
        schedules=found.schedules,
        states=tuple(found.states),
        attached=dict(found.attached),
    )


def not_built(planned: PlannedTrial, error: StackError) -> TrialResult:
    """Its environment could not be had."""
    requested: dict[str, str | None] = dict(planned.stack)
    if planned.requires:  # an optional extra: without it the question does not arise
        reason = f"needs {', '.join(planned.requires)}: {error.message}"
        return without_launch(planned, requested, Verdict.NOT_APPLICABLE, reason)
    return without_launch(planned, requested, Verdict.INCONCLUSIVE, error.message)


def without_launch(
    planned: PlannedTrial, versions: dict[str, str | None], verdict: Verdict, reason: str
) -> TrialResult:
    """Its ranks never ran."""
    trial = planned.trial
    found = Diagnosis(
        verdict=verdict, signature=str(verdict), confidence=Confidence.HIGH, cause=reason
    )
    return TrialResult(
        variant=trial.variant,
        role=trial.role,
        stack=versions,
        launcher=trial.launcher,
        backend=trial.backend,
        world_size=trial.world_size,
        shared_gpu=trial.shared_gpu,
        verdict=str(verdict),
        expected=_expected(planned),
        met=conclusion.met(planned.expected, found, trial.backend),
        signature=str(verdict),
        confidence=str(Confidence.HIGH),
        cause=reason,
        repeat=planned.repeat,
        must_show=_must_show(planned),
        repairs=planned.repairs,
        notes=_notes(planned),
    )


def _notes(planned: PlannedTrial, *others: str) -> tuple[str, ...]:
    return (*([planned.note] if planned.note else []), *others)


def _must_show(planned: PlannedTrial) -> str:
    return (planned.expected.shows or "") if planned.expected is not None else ""


def _expected(planned: PlannedTrial) -> str:
    if planned.expected is None:
        return str(Verdict.CLEAN)
    return " or ".join(planned.expected.verdicts(planned.trial.backend))
