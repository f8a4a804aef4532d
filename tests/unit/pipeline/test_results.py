"""What a diagnosis found arrives in the row of result.json."""

from pathlib import Path

from moediag.pipeline import rows
from moediag.result.diagnosis import Diagnosis
from moediag.result.run_result import Seconds, Table
from moediag.result.verdicts import Confidence, Verdict
from moediag.scenario import catalogue, load
from moediag.scenario.plan import plan
from moediag.stacks.environment import Stack


def test_tables_of_a_detector_are_carried_over() -> None:
    scenario = load.load(catalogue.find("expert-starvation"))
    planned = plan(scenario, 2, "cpu", ["unfixed"]).trials[0]
    table = Table("norm per rank", ("rank", "norm"), ((0, 3.4007), (1, 3.3808)))
    found = Diagnosis(Verdict.REPLICA_DIVERGENCE, "s", Confidence.HIGH, tables=(table,))
    stack = Stack(Path("python"), {}, "key", 0.0, [])
    row = rows.launched(planned, stack, found, Seconds(), "unfixed", other_batch=False)
    assert row.tables == (table,)
