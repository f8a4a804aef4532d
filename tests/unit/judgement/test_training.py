"""Loss and gradient norm of a training run, compared between variants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moediag.lab.judgement import training_table
from moediag.lab.judgement.training_table import Curve, curve, side_by_side
from moediag.lab.scenario.catalogue import find
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import Plan, plan
from moediag.protocol import Outcome
from moediag.result import TrialResult
from tests.unit.trial_results import trial_result

NAN = float("nan")


def run(name: str, losses: tuple[float, ...], **changes: Any) -> Curve:
    base = Curve(name, "clean", losses, tuple(2 * x for x in losses), (1.0, 0.5), (2.0, 1.0))
    return dataclasses.replace(base, **changes)


def result(variant: str, **changes: Any) -> TrialResult:
    return trial_result(variant, evidence=variant, **changes)


class TestSideBySide:
    def test_runs_of_one_reference_share_its_column(self) -> None:
        losses, norms = side_by_side([run("unfixed", (4.0, 3.0)), run("native", (1.0, 0.5))])
        assert losses.columns == ("step", "one process", "unfixed", "native")
        assert losses.rows == ((1, 1.0, 4.0, 1.0), (2, 0.5, 3.0, 0.5))
        assert norms.rows == ((1, 2.0, 8.0, 2.0), (2, 1.0, 6.0, 1.0))
        assert losses.note == norms.note == ""
        assert losses.title == "Loss of each step, mean over ranks"
        assert norms.title == "Gradient norm of each step, before clipping"

    def test_rounding_does_not_make_another_reference(self) -> None:
        near = run("native", (1.0, 0.5), reference_losses=(1.0 + 1e-7, 0.5))
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), near])
        assert losses.columns.count("one process") == 1
        assert len(losses.columns) == 4

    @pytest.mark.parametrize(("share", "alike"), [(0.0009, True), (0.0011, False)])
    def test_references_within_a_thousandth_are_equal(self, share: float, alike: bool) -> None:
        near = run("native", (1.0, 0.5), reference_norms=(2.0, 1.0 + share))
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), near])
        assert len(losses.columns) == (4 if alike else 5)
        # A share, not a difference: of the norm 2.0 it is twice as much.
        near = run("native", (1.0, 0.5), reference_norms=(2.0 + 2 * share, 1.0))
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), near])
        assert len(losses.columns) == (4 if alike else 5)
        longer = run("native", (1.0, 0.5), reference_norms=(2.0, 1.0, 1.0))
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), longer])
        assert len(losses.columns) == 5

    def test_a_third_run_is_grouped_with_its_reference(self) -> None:
        other = run("no-ep", (7.0, 6.0), reference_losses=(7.0, 6.0))
        third = dataclasses.replace(other, name="no-ep-native")
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), other, third])
        assert losses.columns[3:] == ("one process (no-ep)", "no-ep", "no-ep-native")

    def test_another_batch_has_a_separate_reference(self) -> None:
        other = run("no-ep", (7.0, 6.0), reference_losses=(7.0, 6.0))
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), other])
        assert losses.columns == ("step", "one process", "unfixed", "one process (no-ep)", "no-ep")
        assert losses.rows[0] == (1, 1.0, 4.0, 7.0, 7.0)

    def test_a_trial_without_steps_is_in_the_note_only(self) -> None:
        losses, _ = side_by_side([run("unfixed", (4.0, 3.0)), Curve("as-released", "crash")])
        assert losses.columns == ("step", "one process", "unfixed")
        assert losses.note == "No step of as-released (crash)."

    def test_nonfinite_numbers_are_text_and_missing_ones_are_empty(self) -> None:
        losses, norms = side_by_side([run("unfixed", (4.0, NAN), norms=(None, float("inf")))])
        assert [row[2] for row in losses.rows] == [4.0, "nan"]
        assert [row[2] for row in norms.rows] == [None, "inf"]

    def test_a_run_that_ended_early_leaves_cells_empty(self) -> None:
        losses, _ = side_by_side([run("unfixed", (4.0,))])
        assert losses.rows == ((1, 1.0, 4.0), (2, 0.5, None))

    def test_no_numbers_give_no_table(self) -> None:
        assert side_by_side([Curve("as-released", "crash")]) == ()
        assert side_by_side([]) == ()


def outcomes(*losses: float) -> dict[int, Outcome]:
    return {
        rank: Outcome(
            rank, losses=[loss, 2 * loss], gradient_norms=[float(rank), 1.0],
            reference_losses=[1.0, 2.0], reference_norms=[3.0, 4.0],
        )
        for rank, loss in enumerate(losses)
    }  # fmt: skip


class TestCurve:
    def test_losses_are_averaged_and_norms_are_from_rank_0(self) -> None:
        found = curve(result("unfixed"), outcomes(1.0, 3.0))
        assert found.losses == (2.0, 4.0)
        assert found.norms == (0.0, 1.0)
        assert (found.reference_losses, found.reference_norms) == ((1.0, 2.0), (3.0, 4.0))

    @pytest.mark.parametrize("left", [{}, {0: Outcome(0, losses=[1.0])},
                                      {0: Outcome(0, losses=[1.0]), 1: Outcome(1)}])  # fmt: skip
    def test_a_rank_without_numbers_leaves_the_curve_empty(self, left: dict[int, Outcome]) -> None:
        assert curve(result("unfixed", verdict="crash"), left) == Curve("unfixed", "crash")


class TestTables:
    @pytest.fixture
    def planned(self) -> Plan:
        return plan(load(find("ep-sft")), None, "cpu")

    def test_numbers_are_read_from_the_run_folders(self, planned: Plan, tmp_path: Path) -> None:
        folder = tmp_path / "unfixed"
        folder.mkdir()
        for outcome in outcomes(1.0, 3.0).values():
            outcome.write(folder)
        trials = [result("unfixed"), result("as-released", verdict="crash")]
        losses, _ = training_table.tables(planned, trials, tmp_path)
        assert losses.rows == ((1, 1.0, 2.0), (2, 2.0, 4.0))
        assert "as-released (crash)" in losses.note

    def test_only_the_first_repeat_of_a_variant_has_a_column(
        self, planned: Plan, tmp_path: Path
    ) -> None:
        for number, folder in enumerate(("unfixed", "unfixed.2")):
            (tmp_path / folder).mkdir()
            for outcome in outcomes(1.0 + number, 3.0).values():
                outcome.write(tmp_path / folder)
        again = trial_result("unfixed", evidence="unfixed.2", repeat=1)
        losses, _ = training_table.tables(planned, [result("unfixed"), again], tmp_path)
        assert losses.columns == ("step", "one process", "unfixed")
        assert losses.rows[0] == (1, 1.0, 2.0)

    def test_a_trial_without_a_folder_has_no_numbers(self, planned: Plan, tmp_path: Path) -> None:
        for outcome in outcomes(1.0, 3.0).values():
            outcome.write(tmp_path)
        assert training_table.tables(planned, [trial_result("unfixed")], tmp_path) == ()

    def test_a_scenario_without_a_trainer_has_no_table(self, tmp_path: Path) -> None:
        other = plan(load(find("expert-starvation-silent")), None, "cpu")
        (tmp_path / "unfixed").mkdir()
        for outcome in outcomes(1.0, 3.0).values():
            outcome.write(tmp_path / "unfixed")
        assert training_table.tables(other, [result(other.trials[0].trial.variant)], tmp_path) == ()
