"""A fix that breaks what worked is told from one that merely does not help."""

from __future__ import annotations

from moediag.judgement.regressions import with_regressions
from moediag.result import TrialResult
from moediag.scenario import catalogue
from moediag.scenario.load import load
from moediag.scenario.plan import plan
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


def test_a_fix_that_fails_where_the_same_run_without_it_is_clean_regresses() -> None:
    notes = noted("clean")
    assert notes["unused-params-flag-starved-everywhere"] == (
        "regresses: the same run without this fix is clean (starved-everywhere)",
    )
    # The unfixed code fails there too: it does not help, but it breaks nothing.
    assert notes["unused-params-flag"] == ()
    assert notes["zero-fill"] == ()


def test_without_a_clean_run_beside_it_nothing_is_said() -> None:
    assert not any(noted("crash").values())
