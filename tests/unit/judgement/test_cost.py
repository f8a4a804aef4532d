from __future__ import annotations

from pathlib import Path

import pytest

from moediag.judgement.step_time import ratios, with_ratios
from moediag.protocol import Outcome
from moediag.result import TrialResult
from moediag.scenario import catalogue
from moediag.scenario.load import load
from moediag.scenario.plan import plan
from tests.unit.trial_results import trial_result


def test_a_ratio_is_taken_round_by_round():
    # The machine was twice as slow in round 2; the fix costs 10 % in every round.
    found = ratios({"": [1.0, 2.0, 1.0], "again": [1.0, 2.0, 1.0], "touch": [1.1, 2.2, 1.1]})
    assert found["touch"].median == pytest.approx(1.1)
    assert found["touch"].quartiles == pytest.approx((1.1, 1.1))


def test_the_unfixed_step_shows_the_noise_of_its_second_timing():
    found = ratios({"": [1.0, 1.0, 1.0, 1.0], "again": [0.9, 1.0, 1.1, 1.2]})
    assert found[""].median == 1.0
    low, high = found[""].quartiles
    assert low < 1.05 < high
    assert "again" not in found


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
        assert found["touch"].step_time_ratio == pytest.approx(1.15)
        assert found["unfixed"].step_time_ratio == 1.0
        # Other data, another stack, a control: not this step.
        others = ("identical-sampler", "upgrade", "identical-batches")
        assert [found[name].step_time_ratio for name in others] == [None] * 3
        assert "cost" not in found

    def test_a_cost_trial_that_failed_is_a_note_and_no_failing_control(
        self, tmp_path: Path
    ) -> None:
        found = {r.variant: r for r in with_ratios(self.PLAN, self.results("crash"), tmp_path)}
        assert "cost" not in found
        assert found["unfixed"].notes == (
            "step times were not measured: crash. Rank 0 ran out of memory.",
        )
        assert found["touch"].step_time_ratio is None
        assert found["touch"].notes == ()
