"""A scenario that only measures: how it is written and planned, what its times and bytes mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.diagnosis.diagnose import diagnose
from moediag.diagnosis.numbers.load_cost import growth, load_tables
from moediag.errors import ExitCode, ScenarioError
from moediag.evidence.model import Evidence, RankEvidence
from moediag.judgement import conclusion
from moediag.protocol import LOAD_METHODS, LoadCostSpec, LoadTiming, Outcome, Trial
from moediag.report.page import exit_code, page_of
from moediag.result import Conclusion, Diagnosis, RunResult, Table, Verdict
from moediag.scenario import catalogue, sections
from moediag.scenario.load import load
from moediag.scenario.plan import plan
from tests.unit.trial_results import trial_result

MEASURING = """\
schema_version: 1
name: mine
title: loading
load_cost: {parameters: [10]}
variants:
  loads: {role: control, title: all ways, expect: {verdict: clean}}
"""


def timing(
    method: str, parameters: int, seconds: list[float], bare: list[float] | None = None,
    wrong: list[str] | None = None,
) -> LoadTiming:  # fmt: skip
    calls = {"local": {}, "coalesced": {"broadcast": 1}}.get(method, {"broadcast": parameters})
    size = parameters * 4_000
    return LoadTiming(method, parameters, size, calls, seconds, bare or [], wrong or [])


TIMINGS = [
    timing("per-parameter", 100, [0.1, 0.2, 0.1], [0.08, 0.16, 0.08]),
    timing("per-parameter", 400, [0.4, 0.8, 0.4], [0.32, 0.64, 0.32]),
    timing("coalesced", 100, [0.05, 0.1, 0.05], [0.01, 0.02, 0.01]),
    timing("coalesced", 400, [0.1, 0.2, 0.08], [0.02, 0.04, 0.02]),
    timing("local", 100, [0.02, 0.02, 0.02]),
    timing("local", 400, [0.08, 0.08, 0.08]),
]


def diagnosed(*by_rank: list[LoadTiming]) -> Diagnosis:
    ranks = {
        rank: RankEvidence(rank, outcome=Outcome(rank, loads=loads, steps_done=3))
        for rank, loads in enumerate(by_rank)
    }
    return diagnose(Evidence(len(ranks), ranks, backend="gloo"))


class TestTheScenario:
    def test_the_methods_are_those_of_the_protocol(self) -> None:
        section = sections.LoadCostSection()
        assert tuple(section.methods) == LOAD_METHODS
        with pytest.raises(ValueError, match="methods"):
            sections.LoadCostSection(methods=["telepathy"])  # type: ignore[list-item]

    def test_its_trial_is_timed_unrecorded_and_without_a_reference(self, tmp_path: Path) -> None:
        scenario = load(catalogue.find("ep-load-cost"), ["load_cost.parameters=[5,7]"])
        (only,) = plan(scenario, 4, "cpu", launcher="torchrun").trials
        trial = only.trial
        assert (trial.purpose, trial.variant, trial.role) == ("load-cost", "loads", "control")
        assert (trial.record, only.reference_key) == (False, None)
        assert trial.load_cost == LoadCostSpec(parameters=[5, 7], numel=4096)
        assert Trial.read(trial.write(tmp_path)) == trial

    def test_other_scenarios_load_nothing(self) -> None:
        for planned in plan(load(catalogue.find("expert-starvation")), 2, "cpu").trials:
            assert planned.trial.load_cost is None
            assert planned.trial.purpose in ("step", "cost")

    def test_it_needs_nothing_unfixed_and_may_have_nothing_but_controls(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(MEASURING)
        assert load(path).measures
        path.write_text(MEASURING.replace("role: control", "role: unfixed"))
        with pytest.raises(ScenarioError, match="only measures: each variant is a control"):
            load(path)
        path.write_text(MEASURING.replace("load_cost: {parameters: [10]}\n", ""))
        with pytest.raises(ScenarioError, match="one variant must have `role: unfixed`"):
            load(path)

    def test_a_size_of_nothing_is_refused(self) -> None:
        for wrong in ("[]", "[0]", "[100,-1]"):
            with pytest.raises(ScenarioError, match=r"load_cost\.parameters"):
                load(catalogue.find("ep-load-cost"), [f"load_cost.parameters={wrong}"])


class TestTheBytes:
    def test_right_bytes_everywhere_are_clean(self) -> None:
        found = diagnosed(TIMINGS, TIMINGS)
        assert (found.verdict, found.culprits) == (Verdict.CLEAN, ())
        assert found.cause.startswith("Models of 100 to 400 parameters, loaded by 3 methods")
        assert found.parameters_compared == 0

    def test_wrong_bytes_on_one_rank_are_wrong_weights_of_that_method(self) -> None:
        bad = timing("coalesced", 400, [0.1], wrong=["layers.0.experts.3.weight"])
        found = diagnosed(TIMINGS, [*TIMINGS[:3], bad, *TIMINGS[4:]])
        assert (found.verdict, found.confidence) == (Verdict.WRONG_WEIGHTS, "high")
        assert found.cause == (
            "coalesced of 400 parameters delivered wrong bytes to rank 1 (first in "
            "layers.0.experts.3.weight). The method is at fault, no rank is."
        )
        assert found.culprits == ()
        assert "loaded by coalesced" in found.signature
        # The times stay: they are what was measured, of whatever was delivered.
        assert found.tables

    def test_a_rank_that_left_nothing_decides_nothing(self) -> None:
        ranks = {
            0: RankEvidence(0, outcome=Outcome(0, loads=TIMINGS)),
            1: RankEvidence(1),
        }
        assert diagnose(Evidence(2, ranks, backend="gloo")).verdict == Verdict.INCONCLUSIVE

    def test_a_run_claims_nothing_and_says_whether_it_held(self) -> None:
        def run(verdict: str) -> RunResult:
            row = trial_result(
                "loads", "control", verdict=verdict, expected="clean", met=verdict == "clean",
                cause="why",
            )  # fmt: skip
            return RunResult("mine", "", "", {}, (row,), conclusion.conclusion([row]))

        assert run("clean").conclusion == Conclusion(reproduced=None)
        assert exit_code(run("clean")) == ExitCode.OK
        assert page_of(run("clean")).conclusion[-1] == "clean in 1 trial"
        # What was delivered is wrong, so what it took proves nothing.
        assert exit_code(run("wrong-weights")) == ExitCode.INCONCLUSIVE
        assert page_of(run("wrong-weights")).findings[0].verdict == "wrong-weights"


def test_an_outcome_survives_its_file(tmp_path: Path) -> None:
    outcome = Outcome(1, loads=TIMINGS)
    assert Outcome.read(outcome.write(tmp_path)) == outcome


class TestTheTables:
    @pytest.fixture
    def tables(self) -> dict[str, Table]:
        return {table.title: table for table in load_tables(TIMINGS)}

    def test_rows_are_methods_and_columns_sizes(self, tables: dict[str, Table]) -> None:
        table = tables["Loading the weights, in ms"]
        assert table.columns == (
            "method", "100 parameters", "400 parameters", "per 1,000", "growth",
        )  # fmt: skip
        assert table.rows == (
            ("per-parameter", 100.0, 400.0, 1000.0, 1.0),
            ("coalesced", 50.0, 100.0, 250.0, 0.5),
            ("local", 20.0, 80.0, 200.0, 1.0),
        )
        assert "1.6 MB at 400 parameters; median of 3 rounds" in table.note

    def test_a_ratio_is_taken_round_by_round(self, tables: dict[str, Table]) -> None:
        table = tables["Loading, times faster than one broadcast per parameter"]
        # Round 2 was slow for both; 4, 4 and 5 times in the rounds of 400 parameters.
        assert table.rows == (
            ("coalesced", 2.0, 4.0, "4.00 to 4.50"),
            ("local", 5.0, 5.0, "5.00 to 7.50"),
        )

    def test_communication_alone_says_of_how_many_calls(self, tables: dict[str, Table]) -> None:
        table = tables["Communication alone, in ms"]
        assert [(row[0], row[1], row[-1]) for row in table.rows] == [
            ("per-parameter", 80.0, "400 broadcast"),
            ("coalesced", 10.0, "1 broadcast"),
            ("local", None, "none"),
        ]
        assert tables["Communication, times faster"].rows == (
            ("coalesced", 8.0, 16.0, "16.00 to 16.00"),
        )

    def test_without_the_baseline_nothing_is_compared(self) -> None:
        tables = load_tables(TIMINGS[4:])
        assert [table.title for table in tables] == ["Loading the weights, in ms"]

    def test_one_size_in_one_round_has_no_growth_and_no_spread(self) -> None:
        times, ratios = load_tables(
            [timing("per-parameter", 10, [0.2]), timing("local", 10, [0.1])]
        )
        assert times.columns == ("method", "10 parameters", "per 1,000")
        assert times.rows == (("per-parameter", 200.0, 20_000.0), ("local", 100.0, 10_000.0))
        assert "Growth" not in times.note
        assert ratios.rows == (("local", 2.0, None),)

    def test_nothing_timed_is_no_table(self) -> None:
        assert load_tables([]) == ()


@given(
    st.floats(0.1, 3.0),
    st.floats(1e-6, 10.0),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True),
)
def test_growth_finds_the_exponent(exponent: float, factor: float, sizes: list[int]) -> None:
    found = growth({size: factor * size**exponent for size in sizes})
    assert found == pytest.approx(exponent, abs=1e-3)


def test_growth_needs_two_sizes() -> None:
    assert growth({100: 1.0}) is None
    assert growth({}) is None
    assert growth({100: 0.0, 200: 1.0}) is None
