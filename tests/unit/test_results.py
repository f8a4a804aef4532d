"""What a diagnosis found arrives in the row of result.json."""

from pathlib import Path

from moediag import results
from moediag.diagnosis.model import Diagnosis
from moediag.report.model import Seconds, Table
from moediag.scenario import catalogue, load
from moediag.scenario.plan import plan
from moediag.stacks.environment import Stack
from moediag.verdicts import Confidence, Verdict


def test_tables_of_a_detector_are_carried_over() -> None:
    scenario = load.load(catalogue.find("expert-starvation"))
    planned = plan(scenario, 2, "cpu", ["unfixed"]).trials[0]
    table = Table("norm per rank", ("rank", "norm"), ((0, 3.4007), (1, 3.3808)))
    found = Diagnosis(Verdict.REPLICA_DIVERGENCE, "s", Confidence.HIGH, tables=(table,))
    stack = Stack(Path("python"), {}, "key", 0.0, [])
    row = results.launched(planned, stack, found, Seconds(), "unfixed", other_batch=False)
    assert row.tables == (table,)
