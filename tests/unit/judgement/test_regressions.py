"""A fix that breaks a working run is distinguished from one that does not help."""

from __future__ import annotations

import dataclasses

import pytest

from moediag.lab.judgement.fix_effect import with_regressions
from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import Plan, PlannedTrial, plan
from moediag.protocol import ModelSpec, ProgramTask, SkewSpec, StepSpec, Trial, WrapperSpec
from moediag.result import TrialResult
from tests.unit.trial_results import trial_result

VARIANTS = ("unfixed", "unused-params-flag", "unused-params-flag-starved-everywhere")


def result(variant: str, role: str, verdict: str) -> TrialResult:
    return trial_result(variant, role, verdict=verdict)


def noted(control: str) -> dict[str, tuple[str, ...]]:
    """Notes by variant, the control having ended with verdict ``control``."""
    scenario = load(catalogue.find("expert-starvation-accumulate"))
    planned = plan(scenario, 2, "cpu")
    results = [
        result("unfixed", "unfixed", "collective-mismatch"),
        result("unused-params-flag", "fix", "crash"),
        result("unused-params-flag-starved-everywhere", "fix", "crash"),
        result("zero-fill", "fix", "clean"),
        result("starved-everywhere", "control", control),
    ]
    with_notes = with_regressions(planned, results)
    assert [bool(r.notes) for r in with_notes] == [bool(r.clean_without) for r in with_notes]
    return {r.variant: r.notes for r in with_notes}


def test_a_fix_that_fails_where_the_unfixed_run_is_clean_regresses() -> None:
    notes = noted("clean")
    assert notes["unused-params-flag-starved-everywhere"] == (
        "regresses: the same run without this fix is clean (starved-everywhere)",
    )
    # The unfixed code fails there too: the fix does not help, but breaks nothing.
    assert notes["unused-params-flag"] == ()
    assert notes["zero-fill"] == ()


def test_no_regression_is_reported_without_a_clean_run() -> None:
    assert not any(noted("crash").values())


FIXED = PlannedTrial(Trial("touch", "s", "touch", role="fix", fix="touch"), {"torch": "2.7.0"})
WITHOUT = PlannedTrial(Trial("plain", "s", "plain", role="control"), {"torch": "2.7.0"})


def said(without: PlannedTrial) -> bool:
    """Whether the failing fix is noted to break the clean run ``without`` it."""
    results = [result("plain", "control", "clean"), result("touch", "fix", "crash")]
    scenario = load(catalogue.find("expert-starvation"))
    noted = with_regressions(Plan(scenario, (without, FIXED)), results)
    assert noted[0].notes == ()
    return bool(noted[1].notes)


def test_the_same_run_without_the_fix_is_compared() -> None:
    assert said(WITHOUT)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ModelSpec(experts=64)},
        {"wrapper": WrapperSpec(kind="ddp")},
        {"step": StepSpec(steps=7)},
        {"skew": SkewSpec(batches="identical")},
        {"task": ProgramTask("metrics", {})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_different_run_is_not_compared(changes: dict[str, object]) -> None:
    trial = dataclasses.replace(WITHOUT.trial, **changes)  # type: ignore[arg-type]
    assert not said(dataclasses.replace(WITHOUT, trial=trial))


def test_a_run_with_another_stack_or_reference_is_not_compared() -> None:
    assert not said(dataclasses.replace(WITHOUT, stack={"torch": "2.8.0"}))
    assert not said(dataclasses.replace(WITHOUT, reference_key="another"))


def test_a_clean_trial_with_a_fix_is_not_compared() -> None:
    fixed = dataclasses.replace(WITHOUT.trial, fix="zero-fill")
    assert not said(dataclasses.replace(WITHOUT, trial=fixed))
