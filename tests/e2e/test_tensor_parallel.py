"""Tensor parallelism in the step under test: a released plan that leaves out a reduction, and two
that are complete. Two gloo ranks on the CPU; four where FSDP2 shards besides."""

from __future__ import annotations

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.test_scenarios import WRONG, holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

OLD = {"transformers": "4.53.2", "accelerate": "1.8.1"}
NEW = {"transformers": "5.23.0", "accelerate": "1.15.0"}
NORMS = "model.layers.{0,1}.self_attn.{q,k}_norm.weight"


@pytest.fixture(params=["few", *(pytest.param(n, marks=pytest.mark.wide) for n in ("2", "4"))])
def ran(command: Command, request: pytest.FixtureRequest) -> Ran:
    need(OLD)
    if request.param == "few":
        return command.run("tp-head-norm", variants=("unfixed", "mixtral"))
    need(NEW)
    return command.run("tp-head-norm", "--cpu", request.param)


def test_only_the_plan_without_the_reduction_is_wrong(ran: Ran) -> None:
    holds(ran)
    assert ran.verdicts["unfixed"] == WRONG


def test_the_parameters_without_a_sum_are_reported(ran: Ran) -> None:
    trial = ran.trial("unfixed")
    assert "4 of 69 parameters have wrong gradients" in trial["cause"]
    assert f"differ between ranks that hold the same slice ({NORMS})" in trial["cause"]
    assert trial["signature"] == "wrong-gradients:replicas differ:no-rank"
    assert "The loss of that step is correct to five digits" in trial["cause"]


@pytest.mark.wide
@pytest.mark.parametrize("cpu", ["2", "4"])
def test_a_later_release_lacks_the_reduction_for_another_family(command: Command, cpu: str) -> None:
    need(OLD)
    need(NEW)
    cause = command.run("tp-head-norm", "--cpu", cpu).trial("omni")["cause"]
    assert "4 of 81 parameters have wrong gradients" in cause
    assert "(model.language_model.layers.{0,1}.self_attn.{q,k}_norm.weight)" in cause


def test_shards_of_matrices_are_compared(ran: Ran) -> None:
    """Matrices sharded along either dim, and a replicated one."""
    rows = [row for row in ran.rows("unfixed", "Gradients of step 1") if row[0] == "all others"]
    wrong = {placement.partition(" on ")[0]: count for _, placement, count, *_ in rows}
    assert wrong == {"Replicate": 4, "Shard(0)": 0, "Shard(1)": 0}


def test_an_axis_that_the_wrapper_does_not_have_is_not_applicable(command: Command) -> None:
    need(OLD)
    ran = command.run("tp-head-norm", "--variant", "mixtral", "--set", "layout={etp: world}")
    trial = ran.trial("mixtral")
    assert trial["verdict"] == "not-applicable"
    assert "wrapper transformers has no mesh axis etp" in str(trial)
