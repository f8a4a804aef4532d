"""Experts on their own mesh, with real FSDP1 and FSDP2 and a real model: 2 expert-data-parallel
x 2 expert-parallel ranks on the CPU.

Each wrong fix here would pass a weaker detector; the tests say which.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.test_scenarios import holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

NEW = {"transformers": "5.23.0", "accelerate": "1.15.0"}
FACTOR = "wrong-gradients:constant-factor:no-rank"


def run(command: Command, scenario: str, *variants: str) -> Ran:
    need(NEW)
    return command.run(scenario, "--cpu", "4", "--set", "step.steps=2", variants=variants)


def multiples(ran: Ran, variant: str) -> dict[str, Any]:
    (table,) = [t for t in ran.result["tables"] if t["title"].startswith("Multiples of")]
    (row,) = [row for row in table["rows"] if row[0] == variant]
    return dict(zip(table["columns"][1:], row[1:], strict=True))


@pytest.mark.wide
class TestFsdp1:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        return run(
            command, "fsdp1-nested-ep", "experts-ignored", "experts-not-ignored",
            "assertions-removed", "bottom-up", "post-divide-and-clip",
            "assertions-removed-and-post-divide", "no-expert-parallelism",
        )  # fmt: skip

    def test_every_variant_ends_as_measured(self, ran: Ran) -> None:
        holds(ran)
        assert ran.reproduced is True

    def test_both_errors_have_the_text_of_the_report(self, ran: Ran) -> None:
        assert ran.trial("experts-ignored")["cause"].endswith(
            " _ignored_modules: `ignored_modules` should not include FSDP modules."
        )
        assert (
            ": FSDP auto wrapping requires modules to not already have FSDP applied but found "
            "model.layers.0.mlp.experts in" in ran.trial("experts-not-ignored")["cause"]
        )

    def test_without_the_checks_only_gradients_show_the_error(self, ran: Ran) -> None:
        """The loss alone, and the weights alone, would have accepted both."""
        for variant in ("assertions-removed", "bottom-up"):
            trial = ran.trial(variant)
            assert trial["signature"] == FACTOR
            assert "are 2.000 times the reference on every rank" in trial["cause"]
            assert "2 is the size of ep" in trial["cause"]
            assert "the optimizer hides a constant factor" in trial["cause"]
            assert trial["culprits"] == []
            seen = multiples(ran, variant)
            assert (seen["experts"], seen["router"], seen["others"]) == (2.0, 1.0, 1.0)
            assert (seen["experts moved"], seen["loss"]) == (pytest.approx(1.0, abs=2e-3), 1.0)

    def test_the_result_lists_patches(self, ran: Ran) -> None:
        notes = " ".join(ran.trial("assertions-removed")["notes"])
        assert "the two checks of FSDP1 against nesting were removed" in notes
        assert "expert parallelism by hand" in notes


@pytest.mark.wide
class TestFsdp2:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        return run(
            command, "fsdp2-two-meshes", "own-mesh", "two-axes", "per-parameter",
            "own-mesh-sgd", "divide-by-world-two-axes", "divide-by-world-per-parameter",
            "divide-by-world-premul", "divide-by-ep", "loss-divided-by-ep", "clip-per-mesh",
            "clip-per-mesh-and-ep", "no-expert-parallelism",
        )  # fmt: skip

    def test_every_variant_ends_as_measured(self, ran: Ran) -> None:
        holds(ran)
        assert ran.reproduced is True

    @pytest.mark.parametrize("variant", ["own-mesh", "two-axes", "per-parameter", "divide-by-ep"])
    def test_the_factor_is_ep_and_adamw_hides_it(self, ran: Ran, variant: str) -> None:
        trial, seen = ran.trial(variant), multiples(ran, variant)
        assert trial["signature"] == FACTOR
        assert (seen["experts"], seen["others"], seen["loss"]) == (2.0, 1.0, 1.0)
        assert seen["experts moved"] == pytest.approx(1.0, abs=2e-3)

    def test_a_loss_divided_by_ep_is_correct_for_the_experts_only(self, ran: Ran) -> None:
        """A check of only the experts' gradients, the loss or the weights accepts it."""
        trial, seen = ran.trial("loss-divided-by-ep"), multiples(ran, "loss-divided-by-ep")
        assert trial["signature"] == FACTOR
        assert (seen["experts"], seen["router"], seen["others"]) == (1.0, 0.5, 0.5)
        assert (seen["others moved"], seen["loss"]) == (pytest.approx(1.0, abs=2e-3), 1.0)
        assert "divided by it once too many times" in trial["cause"]

    def test_sgd_moves_the_weights_by_the_wrong_factor(self, ran: Ran) -> None:
        assert multiples(ran, "own-mesh-sgd")["experts moved"] == pytest.approx(2.0, abs=0.1)
        assert "hides" not in ran.trial("own-mesh-sgd")["cause"]

    def test_a_reduction_that_gloo_refuses_is_reported(self, ran: Ran) -> None:
        trial = ran.trial("divide-by-world-premul")
        assert "Cannot use ReduceOp.PREMUL_SUM with Gloo" in trial["cause"]
        assert trial["culprits"] == [0, 1, 2, 3]

    def test_a_norm_over_meshes_misses_experts_of_other_ranks(self, ran: Ran) -> None:
        """Every gradient before clipping is right, and so are loss and weights under AdamW: the
        norms of the ranks beside each other tell."""
        trial, seen = ran.trial("clip-per-mesh"), multiples(ran, "clip-per-mesh")
        assert trial["signature"] == "replica-divergence:gradient norm:no-rank"
        assert "experts 0-3 on ranks 0, 2, 4-7 on ranks 1, 3" in trial["cause"]
        assert trial["wrong_parameters"] == []
        assert trial["gradient_error"] < 1e-5
        assert (seen["experts"], seen["others"], seen["loss"]) == (1.0, 1.0, 1.0)
