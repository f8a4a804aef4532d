"""result.json contains the whole diagnosis."""

from moediag.lab.pipeline import planned_rows
from moediag.lab.scenario import catalogue, load
from moediag.lab.scenario.plan import plan
from moediag.result import Confidence, Diagnosis, Table, Verdict


def test_tables_of_a_detector_are_carried_over() -> None:
    scenario = load.load(catalogue.find("expert-starvation"))
    planned = plan(scenario, 2, "cpu", ["unfixed"]).trials[0]
    table = Table("norm per rank", ("rank", "norm"), ((0, 3.4007), (1, 3.3808)))
    found = Diagnosis(Verdict.REPLICA_DIVERGENCE, "s", Confidence.HIGH, tables=(table,))
    row = planned_rows.planned_row(planned, found, {})
    assert row.diagnosis is found
    assert row.to_json()["tables"][0]["title"] == "norm per rank"
