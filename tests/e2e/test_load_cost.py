"""Loading on real ranks: the right bytes by every method, the wrong ones caught, times in tables.

No time is compared with another: what is fast here is not fast on a busy machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag.diagnosis.diagnose import diagnose
from moediag.evidence.trial_folder import read_trial
from moediag.launch.launcher import launcher
from moediag.launch.settings import LaunchOptions
from moediag.protocol import LOAD_METHODS, LoadCostSpec, Trial
from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = pytest.mark.e2e

STACK = {"transformers": "5.23.0", "accelerate": "1.15.0"}
SMALL = ("ep-load-cost", "--set", "load_cost.parameters=[16,40]", "--set", "load_cost.rounds=2")


def holds(ran: Ran, ranks: int) -> None:
    assert problems(ran.result) == []
    assert ran.code == 0
    assert ran.result["conclusion"] == {
        "reproduced": None, "fixes": [], "cheapest_correct_fix": None, "claims": [],
    }  # fmt: skip
    (trial,) = ran.result["trials"]
    assert (trial["verdict"], trial["world_size"], trial["culprits"]) == ("clean", ranks, [])
    assert "bit by bit, on every rank" in trial["cause"]
    assert any("stand-in for the Accelerator" in note for note in trial["notes"])
    times = trial["tables"][0]
    assert times["columns"][:3] == ["method", "16 parameters", "40 parameters"]
    assert [row[0] for row in times["rows"]] == list(LOAD_METHODS)
    assert all(cell > 0 for row in times["rows"] for cell in row[1:4])
    calls = {row[0]: row[-1] for row in trial["tables"][2]["rows"]}
    # As in accelerate 1.15.0: each parameter is broadcast whole, and then scattered as well.
    assert calls["accelerate"] == "40 broadcast, 40 scatter"
    assert calls["per-parameter"] == "40 broadcast"
    assert calls["coalesced"] == "1 broadcast"
    assert calls["local"] == "none"


class TestTheScenario:
    pytestmark = pytest.mark.stack

    def test_two_ranks_by_the_fork_launcher(self, command: Command) -> None:
        need(STACK)
        holds(command.run(*SMALL), 2)

    def test_two_ranks_by_torchrun(self, command: Command) -> None:
        need(STACK)
        holds(command.run(*SMALL, "--launcher", "torchrun"), 2)

    def test_four_ranks_among_which_vectors_are_not_even(self, command: Command) -> None:
        need(STACK)
        holds(command.run(*SMALL, "--cpu", "4"), 4)

    def test_a_finished_run_is_diagnosed_again_with_its_tables(self, command: Command) -> None:
        need(STACK)
        ran = command.run(*SMALL)
        code, out, _ = command.call("diagnose", str(ran.folder), "--json")
        assert code == 0
        (trial,) = json.loads(out)["trials"]
        assert trial["tables"] == ran.result["trials"][0]["tables"]


def test_wrong_methods_are_caught_and_the_right_ones_beside_them_are_not(tmp_path: Path) -> None:
    methods = ["per-parameter", "first-rows-for-all", "coalesced", "nothing-sent", "scatter"]
    trial = Trial(
        "loads", "s", "loads", role="control", purpose="load-cost", layout={"dp_shard": 2},
        load_cost=LoadCostSpec([8, 24], 64, methods, 2), record=False,
    )  # fmt: skip
    victims = Path(__file__).parents[1] / "victims"
    stack = SimpleNamespace(python=Path(sys.executable), pythonpath=[victims], key="here")
    environment = {"MOEDIAG_RANK_MAIN": "wrong_load:main", "MOEDIAG_WARM": "wrong_load:warm"}
    with launcher("fork", stack, tmp_path, LaunchOptions(environment=environment)) as launch:
        record = launch.run(trial, tmp_path / "loads")
    assert record.succeeded
    evidence = read_trial(tmp_path / "loads")
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == ("wrong-weights", ())
    wrong = {
        (rank, load.method)
        for rank, seen in evidence.ranks.items()
        if seen.outcome is not None
        for load in seen.outcome.loads
        if load.wrong
    }
    assert wrong == {(1, "first-rows-for-all"), (1, "nothing-sent")}
    assert "first-rows-for-all of 24 parameters delivered wrong bytes to rank 1" in found.cause
    assert "coalesced" not in found.cause
