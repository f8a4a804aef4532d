"""Rows of result.json of planned trials: compared with expectations, or never launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moediag.errors import StackError
from moediag.lab.scenario.plan import PlannedTrial
from moediag.pipeline import rows
from moediag.result import Confidence, Diagnosis, TrialResult, Verdict


def planned_row(
    planned: PlannedTrial,
    diagnosis: Diagnosis,
    stack: Mapping[str, str | None],
    evidence: str = "",
) -> TrialResult:
    """Returns the result of a planned trial, compared with the plan's expectation."""
    from moediag.lab import judgement

    if planned.note:
        diagnosis = dataclasses.replace(diagnosis, notes=(planned.note, *diagnosis.notes))
    backend, expected = planned.trial.backend, planned.expected
    verdicts = expected.verdicts(backend) if expected is not None else (str(Verdict.CLEAN),)
    return dataclasses.replace(
        rows.row(planned.trial, diagnosis, stack, evidence),
        expected=" or ".join(verdicts),
        met=judgement.met(expected, diagnosis, backend),
        repeat=planned.repeat,
        must_show=(expected.shows or "") if expected is not None else "",
        repairs=planned.repairs,
        what=planned.what,
        source=planned.source,
    )


def not_built(planned: PlannedTrial, error: StackError) -> TrialResult:
    """Returns the result of a trial whose environment could not be built."""
    requested: dict[str, str | None] = dict(planned.stack)
    if planned.requires:  # an optional extra: without it the trial does not apply
        reason = f"needs {', '.join(planned.requires)}: {error.message}"
        return without_launch(planned, requested, Verdict.NOT_APPLICABLE, reason)
    return without_launch(planned, requested, Verdict.INCONCLUSIVE, error.message)


def without_launch(
    planned: PlannedTrial, stack: Mapping[str, str | None], verdict: Verdict, reason: str
) -> TrialResult:
    """Returns the result of a trial whose ranks never ran."""
    found = Diagnosis(verdict, signature=str(verdict), confidence=Confidence.HIGH, cause=reason)
    return planned_row(planned, found, stack)
