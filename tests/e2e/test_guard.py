"""The guard on real ranks: each starvation is the same named error on every rank, in time, and a
healthy run passes unchanged."""

from __future__ import annotations

import json

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]
ERROR = "ReductionMismatch: "


def errors(ran: Ran, variant: str) -> list[str]:
    """Returns the error of each rank from torch elastic's error files."""
    files = sorted((ran.folder / variant).glob("rank-*.error.json"))
    return [json.loads(file.read_text())["message"]["message"] for file in files]


def costs(ran: Ran, variant: str) -> list[str]:
    """Returns the line of the guard in each rank's output."""
    files = sorted((ran.folder / variant).glob("rank-*.log"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line.startswith("moediag guard on rank ")]


@pytest.fixture(scope="module")
def ran(command: Command) -> Ran:
    need({"transformers": "4.53.2"})
    return command.run("expert-starvation-guard", "--cpu", "2")


def test_every_expectation_is_met(ran: Ran) -> None:
    assert problems(ran.result) == []
    assert (ran.code, ran.reproduced) == (0, True), ran.verdicts
    assert ran.verdicts == {
        "divergent": "crash", "silent": "crash", "absent": "crash",
        "unused-params-flag": "clean", "identical-batches": "clean",
    }  # fmt: skip


@pytest.mark.parametrize("variant", ["divergent", "silent", "absent"])
def test_all_ranks_raise_the_same_named_error(ran: Ran, variant: str) -> None:
    first, second = errors(ran, variant)
    assert first == second
    assert first.startswith(ERROR)


def test_the_error_names_the_missing_parameters(ran: Ran) -> None:
    text = errors(ran, "divergent")[0]
    assert "reduce_scatter of model.layers.1 with different parameters" in text
    assert "rank 0: 33 of 33 parameters\n" in text
    assert "rank 1: 30 of 33 parameters; no gradient for model.layers.1.mlp.experts.3." in text
    trial = ran.trial("divergent")
    assert (trial["culprits"], trial["victims"], trial["confidence"]) == ([1], [0], "high")
    assert "on rank 1 expert 3 of layer 1 received 0 tokens" in trial["cause"].lower()
    assert "The guard stopped ranks 0, 1 before that reduction" in trial["cause"]


def test_the_guard_stops_a_mismatch_that_no_backend_detects(ran: Ran) -> None:
    trial = ran.trial("silent")
    assert trial["culprits"] == [0, 1]
    sizes = {side["numel"] for side in trial["first_divergence"]["ranks"].values()}
    assert len(sizes) == 1
    assert "without the guard nothing would report an error" in trial["cause"]


def test_a_rank_that_waits_in_another_call_is_reported_as_absent(ran: Ran) -> None:
    """The waiting rank is not the culprit: the other one skipped an all-gather."""
    text = errors(ran, "absent")[0]
    assert "rank 0 did not reach the reduce_scatter of model.layers.0.mlp.experts" in text
    assert "within 1 s" in text
    assert ran.trial("absent")["culprits"] == [1]


def test_the_cost_is_in_every_ranks_output_and_on_the_page(ran: Ran) -> None:
    for variant in ran.verdicts:
        if variant != "absent":
            assert len(costs(ran, variant)) == 2, variant
    assert any("guard on rank 0: " in note for note in ran.trial("identical-batches")["notes"])


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["{dp_shard: world}", "{dp_replicate: 2, dp_shard: world}"])
def test_the_guard_compares_shards_and_replicas(command: Command, layout: str) -> None:
    """Ranks in other replicas also raise after the peers of rank 1 in the shard group."""
    need({"transformers": "4.53.2"})
    found = command.run(
        "expert-starvation-guard", "--cpu", "4", "--set", f"layout={layout}",
        "--variant", "divergent", "--variant", "identical-batches",
    )  # fmt: skip
    assert found.verdicts == {"divergent": "crash", "identical-batches": "clean"}
    raised = errors(found, "divergent")
    assert len(raised) == 4
    assert len(set(raised)) == 1
    assert raised[0].startswith(ERROR)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["expert-starvation", "expert-starvation-silent"])
def test_any_scenario_can_use_the_guard(command: Command, name: str) -> None:
    need({"transformers": "4.53.2"})
    found = command.run(name, "--variant", "unfixed", "--set", "recorder.guard=true")
    assert found.verdicts == {"unfixed": "crash"}
    assert found.code == 1, "another failure than the expected one"


@pytest.mark.wide
@pytest.mark.parametrize(
    "sets",
    [("step.accumulate=2", "step.accumulate_sync=false"), ("step.checkpointing=reentrant",),
     ("wrapper.granularity=expert",), ("model.dtype=bfloat16", "wrapper.reduce_dtype=float32")],
)  # fmt: skip
def test_a_healthy_step_of_another_shape_is_clean(command: Command, sets: tuple[str, ...]) -> None:
    need({"transformers": "4.53.2"})
    options = [word for text in sets for word in ("--set", text)]
    found = command.run("expert-starvation-guard", "--variant", "identical-batches", *options)
    assert found.verdicts == {"identical-batches": "clean"}
