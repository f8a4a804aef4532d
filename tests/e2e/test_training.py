"""Training runs by the released Trainers: the silent failure is found, the correct run is clean,
and the table shows what users see. Two gloo ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

SFT = {"accelerate": "1.15.0", "trl": "1.16.0"}


def columns(ran: Ran, title: str) -> dict[str, list[Any]]:
    (table,) = [t for t in ran.result["tables"] if t["title"].startswith(title)]
    return {name: [row[i] for row in table["rows"]] for i, name in enumerate(table["columns"])}


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.mark.wide
class TestSft:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need({"transformers": "5.12.1", **SFT})
        need({"transformers": "5.23.0", **SFT})
        return command.run("ep-sft")

    def test_every_variant_ends_as_expected(self, ran: Ran) -> None:
        assert problems(ran.result) == []
        assert ran.verdicts == {
            "unfixed": "wrong-weights", "as-released": "crash", "plain-trainer": "wrong-weights",
            "unfixed-every-rank-loads": "wrong-weights", "native": "clean", "no-ep": "clean",
        }  # fmt: skip
        assert ran.code == 0
        assert ran.reproduced is True
        assert "experts 4-7 are on no rank" in ran.trial("unfixed")["cause"]
        assert "no dimension for FSDP to shard across" in ran.trial("as-released")["cause"]

    def test_the_table_shows_only_the_lost_experts(self, ran: Ran) -> None:
        for title in ("Loss of each step", "Gradient norm of each step"):
            told = columns(ran, title)
            right = told["one process"]
            assert told["step"] == [1, 2, 3, 4]
            assert "as-released" not in told
            assert all(apart(told[name], right) < 1e-5 for name in ("native", "no-ep"))
        losses = columns(ran, "Loss of each step")
        assert all(
            w > 1.5 * r for w, r in zip(losses["unfixed"], losses["one process"], strict=True)
        )

    def test_the_result_lists_changes_to_the_library(self, ran: Ran) -> None:
        silent, native = ran.trial("unfixed")["notes"], ran.trial("native")["notes"]
        assert any("forget its tp_size" in note for note in silent)
        assert any("never enters its FSDP path on the CPU" in note for note in silent)
        assert not any("tp_size" in note or "on the CPU" in note for note in native)


@pytest.mark.wide
class TestAlone:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        for version in ("5.7.0", "5.12.1", "5.15.1", "5.17.0"):
            need({"transformers": version, "accelerate": "1.15.0"})
        return command.run("ep-sft-alone")

    def test_the_loss_is_counted_once_per_rank(self, ran: Ran) -> None:
        assert all(trial["met"] for trial in ran.result["trials"]), ran.verdicts
        losses = columns(ran, "Loss of each step")
        twice = [2 * loss for loss in losses["one process"]]
        assert apart(losses["unfixed"], twice) < 0.01
        assert apart(losses["repaired"], losses["one process"]) < 1e-5

    def test_unwritten_rows_become_nan(self, ran: Ran) -> None:
        assert columns(ran, "Gradient norm of each step")["unwritten-rows"] == ["nan"] * 4
