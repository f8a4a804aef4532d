"""`ep-resume` on real releases: which experts every rank has after a save and a load, and which
methods restore everything. Two gloo ranks on the CPU, four if parts of several ranks are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

STACKS = ("5.15.1", "5.16.1", "5.23.0")
IN_CI = ("unfixed", "dtensor-dcp", "no-expert-parallelism")  # `make wide` runs the others
DRIFT, CLEAN, CRASH = "resume-drift", "clean", "crash"
STEPS = "4 steps against 2 + 2"
EXPERTS = "Experts of each rank at the save and after loading, by their bytes"


def every(variants: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.wide) for name in variants
    ]


@pytest.fixture
def few(command: Command) -> Ran:
    for release in STACKS[:2]:
        need({"transformers": release, "accelerate": "1.15.0"})
    return command.run("ep-resume", variants=IN_CI)


@pytest.fixture
def whole(command: Command) -> Ran:
    for release in STACKS:
        need({"transformers": release, "accelerate": "1.15.0"})
    return command.run("ep-resume")


@pytest.fixture
def ran(variant: str, request: pytest.FixtureRequest) -> Ran:
    """A run with ``variant``."""
    found: Ran = request.getfixturevalue("few" if variant in IN_CI else "whole")
    return found


@pytest.mark.parametrize("runs", ["few", pytest.param("whole", marks=pytest.mark.wide)])
def test_every_expectation_is_met(runs: str, request: pytest.FixtureRequest) -> None:
    ran: Ran = request.getfixturevalue(runs)
    assert problems(ran.result) == []
    assert all(trial["met"] for trial in ran.result["trials"]), ran.verdicts
    assert (ran.code, ran.reproduced) == (0, True)
    for variant, verdict in ran.verdicts.items():  # a finished run has deleted what it saved
        assert (ran.folder / variant / "saved").exists() is (verdict == CRASH), variant


@pytest.mark.parametrize(
    ("variant", "source", "experts", "gone"),
    [
        ("unfixed", 1, "4-7", "0-3"),
        pytest.param("accelerate-sharded", 1, "4-7", "0-3", marks=pytest.mark.wide),
        pytest.param("accelerate-full", 0, "0-3", "4-7", marks=pytest.mark.wide),
    ],
)
def test_every_rank_loads_the_experts_of_one_rank(
    ran: Ran, variant: str, source: int, experts: str, gone: str
) -> None:
    trial = ran.trial(variant)
    assert trial["cause"].startswith(
        f"After loading, every rank holds rank {source}'s experts {experts} of layers 0 and 1, and "
        f"experts {gone} are on no rank."
    )
    assert "plain tensors of one name on every rank" in trial["cause"]
    assert (trial["confidence"], trial["culprits"]) == ("high", [])
    assert trial["signature"] == "resume-drift:one-rank-everywhere:no-rank"
    assert [row[1:4] for row in ran.rows(variant, EXPERTS)] == [
        [0, "0-3", experts],
        [1, "4-7", experts],
    ]


def test_the_steps_after_the_save_differ_and_the_control_is_exact(few: Ran) -> None:
    trial, rows = few.trial("unfixed"), few.rows("unfixed", STEPS)
    assert [row[:2] for row in rows] == [[3, 0], [3, 1], [4, 0], [4, 1]]
    assert all(row[4] > 0 and row[7] > 0 for row in rows)
    # The loss alone looks like noise.
    assert max(row[4] / row[2] for row in rows) < 1e-3
    assert "two uninterrupted runs differ by 0." in trial["cause"]


@pytest.mark.parametrize(
    "variant",
    every(["dtensor-dcp", "dtensor-accelerate", "dtensor-save-pretrained", "native",
           "no-expert-parallelism"]),
)  # fmt: skip
def test_a_complete_checkpoint_resumes_exactly(ran: Ran, variant: str) -> None:
    trial = ran.trial(variant)
    assert (trial["confidence"], trial["signature"]) == ("high", CLEAN)
    assert "difference 0" in trial["cause"]
    rows = ran.rows(variant, STEPS)
    assert len(rows) == 4
    assert all(row[4] == row[7] == 0 for row in rows)
    assert all(row[2] is not None and row[5] is not None for row in rows)
    assert [row[2:4] for row in ran.rows(variant, EXPERTS)] == [["0-3", "0-3"], ["4-7", "4-7"]]


@pytest.mark.wide
def test_save_pretrained_of_plain_experts_is_refused_by_the_library(whole: Ran) -> None:
    trial = whole.trial("save-pretrained")
    assert "NotImplementedError" in trial["cause"]
    assert trial["culprits"] == [0, 1]


@pytest.mark.wide
def test_on_four_ranks_experts_of_different_ranks_are_mixed(command: Command) -> None:
    need({"transformers": "5.15.1", "accelerate": "1.15.0"})
    ran = command.run("ep-resume", "--variant", "unfixed", "--cpu", "4")
    trial, rows = ran.trial("unfixed"), ran.rows("unfixed", EXPERTS)
    assert trial["verdict"] == DRIFT
    assert trial["signature"] == "resume-drift:ranks-glued-together:no-rank"
    after = {row[0]: row[3] for row in rows}
    assert len(set(after.values())) > 1
    assert len({(row[0], row[3]) for row in rows}) == len(after)  # the same on all ranks


@pytest.mark.wide
def test_without_fsdp_the_copies_differ_before_the_save(command: Command) -> None:
    """5.16.1 keeps the experts; routers and embeddings differ between ranks from the start."""
    need({"transformers": "5.16.1", "accelerate": "1.15.0"})
    ran = command.run(
        "ep-resume", "--variant", "unfixed", "--set", "wrapper.kind=transformers",
        "--stack", "transformers=5.16.1",
    )  # fmt: skip
    trial = ran.trial("unfixed")
    assert trial["verdict"] == DRIFT
    assert trial["signature"] == "resume-drift:copies-were-apart:no-rank"
    assert "Before anything was saved" in trial["cause"]
    assert all(row[2] == row[3] for row in ran.rows("unfixed", EXPERTS))


def test_experts_lost_before_the_save_are_not_blamed_on_it(command: Command) -> None:
    need({"transformers": "5.15.1", "accelerate": "1.15.0"})
    trial = command.run(
        "ep-resume", "--variant", "accelerate-sharded",
        "--set", "variants.accelerate-sharded.wrapper.ignore_experts=false",
    ).trial("accelerate-sharded")  # fmt: skip
    assert trial["verdict"] == "wrong-weights"
    assert any(note.startswith("After saving and loading, 100 tensors") for note in trial["notes"])
