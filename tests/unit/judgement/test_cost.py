from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moediag.lab.judgement.step_time import ratios, with_ratios
from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan
from moediag.protocol import Outcome
from moediag.result import TrialResult
from tests.unit.trial_results import trial_result


def test_ratios_are_computed_per_round():
    # The machine was twice as slow in round 2; the fix costs 10 % in every round.
    found = ratios({"": [1.0, 2.0, 1.0], "again": [1.0, 2.0, 1.0], "touch": [1.1, 2.2, 1.1]})
    assert found["touch"].median == pytest.approx(1.1)
    assert found["touch"].quartiles == pytest.approx((1.1, 1.1))


def test_the_unfixed_steps_spread_is_the_timing_noise():
    found = ratios({"": [1.0, 1.0, 1.0, 1.0], "again": [0.9, 1.0, 1.1, 1.2]})
    assert found[""].median == 1.0
    low, high = found[""].quartiles
    assert low < 1.05 < high
    assert "again" not in found


def test_rounds_without_a_time_are_left_out_of_the_quartiles():
    seconds = {"": [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], "touch": [1.1, 1.5, 9.0, 1.2, 1.4, 1.3]}
    found = ratios(seconds)["touch"]
    assert found.median == pytest.approx(1.3)
    assert found.quartiles == pytest.approx((1.2, 1.4))
    assert ratios({"": [2.0, 2.0], "touch": [3.0, 5.0]})["touch"].median == pytest.approx(2.0)


def test_too_few_rounds_give_no_ratio():
    assert ratios({"": [1.0], "touch": [1.0]}) == {}
    assert ratios({}) == {}


class TestResults:
    PLAN = plan(load(catalogue.find("expert-starvation")), 2, "cpu")

    @staticmethod
    def results(cost: str) -> list[TrialResult]:
        def row(variant: str, role: str, verdict: str, cause: str = "") -> TrialResult:
            return trial_result(variant, role, verdict=verdict, cause=cause)

        return [
            row("unfixed", "unfixed", "collective-mismatch"),
            row("touch", "fix", "clean"),
            row("identical-sampler", "fix", "clean"),
            row("upgrade", "fix", "clean"),
            row("identical-batches", "control", "clean"),
            row("cost", "control", cost, "Rank 0 ran out of memory."),
        ]

    def test_each_trial_of_the_same_code_on_the_same_stack_gets_its_ratio(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "cost"
        folder.mkdir()
        seconds = {"": [1.0, 1.0], "again": [0.98, 1.02], "touch": [1.1, 1.2]}
        Outcome(0, cost=seconds).write(folder)
        found = {r.variant: r for r in with_ratios(self.PLAN, self.results("clean"), tmp_path)}
        assert (found["touch"].step_time_ratio, found["touch"].step_time_spread) == (
            1.15,
            (1.125, 1.175),
        )
        assert found["touch"].step_time_rounds == (1.1, 1.2)
        assert found["unfixed"].step_time_ratio == 1.0
        assert found["unfixed"].step_time_spread == (0.99, 1.01)
        # Other data, another stack, a control: not this step.
        others = ("identical-sampler", "upgrade", "identical-batches")
        assert [found[name].step_time_ratio for name in others] == [None] * 3
        assert "cost" not in found

    def test_a_failed_cost_trial_is_a_note_and_not_a_failing_control(self, tmp_path: Path) -> None:
        found = {r.variant: r for r in with_ratios(self.PLAN, self.results("crash"), tmp_path)}
        assert "cost" not in found
        assert found["unfixed"].notes == (
            "step times were not measured: crash. Rank 0 ran out of memory.",
        )
        assert found["touch"].step_time_ratio is None
        assert found["touch"].notes == ()

    def test_ratios_are_rounded_to_a_thousandth(self, tmp_path: Path) -> None:
        (tmp_path / "cost").mkdir()
        Outcome(0, cost={"": [3.0, 3.0], "touch": [4.0, 5.0]}).write(tmp_path / "cost")
        found = {r.variant: r for r in with_ratios(self.PLAN, self.results("clean"), tmp_path)}
        assert found["touch"].step_time_ratio == 1.5
        assert found["touch"].step_time_spread == (1.417, 1.583)

    def test_a_fix_that_does_not_apply_has_no_ratio(self, tmp_path: Path) -> None:
        (tmp_path / "cost").mkdir()
        Outcome(0, cost={"": [1.0, 1.0], "touch": [1.1, 1.2]}).write(tmp_path / "cost")
        rows = self.results("clean")
        rows[1] = trial_result("touch", "fix", verdict="not-applicable")
        found = {r.variant: r for r in with_ratios(self.PLAN, rows, tmp_path)}
        assert found["touch"].step_time_ratio is None

    def test_results_are_unchanged_without_a_cost_trial(self, tmp_path: Path) -> None:
        rows = self.results("clean")[:-1]
        assert with_ratios(self.PLAN, rows, tmp_path) == tuple(rows)
        untimed = plan(load(catalogue.find("expert-starvation-silent")), 2, "cpu")
        assert with_ratios(untimed, rows, tmp_path) == tuple(rows)

    def test_a_fix_on_another_stack_has_no_ratio(self, tmp_path: Path) -> None:
        (tmp_path / "cost").mkdir()
        Outcome(0, cost={"": [1.0, 1.0], "touch": [1.1, 1.2]}).write(tmp_path / "cost")
        other = tuple(
            replace(p, stack={"transformers": "9.9"}) if p.trial.variant == "touch" else p
            for p in self.PLAN.trials
        )
        rows = with_ratios(replace(self.PLAN, trials=other), self.results("clean"), tmp_path)
        assert {r.variant: r.step_time_ratio for r in rows}["touch"] is None

    def test_a_trial_that_was_not_planned_has_no_ratio(self, tmp_path: Path) -> None:
        (tmp_path / "cost").mkdir()
        Outcome(0, cost={"": [1.0, 1.0], "again": [1.0, 1.0]}).write(tmp_path / "cost")
        other = trial_result("unplanned", "unfixed")
        (found,) = with_ratios(self.PLAN, [other], tmp_path)
        assert found == other
