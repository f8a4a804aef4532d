"""Fixes that break working code: the same run is clean without the fix and fails with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moediag.result import FAILURES, TrialResult, Verdict

if TYPE_CHECKING:
    from moediag.lab.scenario.plan import Plan, PlannedTrial


def with_regressions(plan: Plan, results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
    """``results`` with a note on each failing fix whose own run (same model, step, skew, wrapper
    and stack) was clean in another trial of this plan without a fix."""
    planned = {(p.trial.variant, p.repeat): p for p in plan.trials}
    clean = {
        _question(planned[key]): result.variant
        for result in results
        if (key := (result.variant, result.repeat)) in planned
        and planned[key].trial.fix is None
        and result.verdict == Verdict.CLEAN
    }
    return tuple(_noted(r, planned.get((r.variant, r.repeat)), clean) for r in results)


def _question(planned: PlannedTrial) -> tuple[object, ...]:
    """What identifies a run, apart from its fix."""
    trial = planned.trial
    stack = tuple(sorted(planned.stack.items()))
    how = (trial.model, trial.wrapper, trial.step, trial.skew, trial.task)
    return (planned.reference_key, *map(repr, how), stack)


def _noted(
    result: TrialResult, planned: PlannedTrial | None, clean: dict[tuple[object, ...], str]
) -> TrialResult:
    if planned is None or planned.trial.fix is None or result.verdict not in FAILURES:
        return result
    other = clean.get(_question(planned))
    if other is None:
        return result
    note = f"regresses: the same run without this fix is clean ({other})"
    return dataclasses.replace(result.diagnosed(notes=(*result.notes, note)), clean_without=other)
