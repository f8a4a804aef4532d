"""Expert parallelism on real releases: the optimizer's groups, the gradient norm, the router.

Two gloo ranks on the CPU. Step and accelerate are the released code; the scenarios have details.
"""

from __future__ import annotations

import pytest

from tests.e2e.pipeline import FEW_IN_CI, Command, Ran, need
from tests.e2e.test_scenarios import CRASH, holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

NEW = {"transformers": "5.17.0", "accelerate": "1.15.0"}
PLAIN = {"transformers": "5.7.0", "accelerate": "1.15.0"}  # experts are plain tensors


class TestMixedOptimizer:
    @pytest.fixture(params=FEW_IN_CI)
    def ran(self, command: Command, request: pytest.FixtureRequest) -> Ran:
        need(NEW)
        if request.param == "few":
            few = ("unfixed", "group-per-mesh", "no-expert-parallelism")
            return command.run("ep-mixed-optimizer", variants=few)
        need(PLAIN)
        return command.run("ep-mixed-optimizer")

    def test_the_mixed_group_is_reported_although_the_rank_died(self, ran: Ran) -> None:
        holds(ran)
        assert ran.reproduced is True
        trial = ran.trial("unfixed")
        assert (trial["verdict"], trial["culprits"]) == (CRASH, [0, 1])
        assert trial["signature"].startswith("crash:RuntimeError:")
        assert (
            "Parameter group 0 holds 21 plain tensors and 4 DTensors on mesh unnamed [0, 1]; "
            "AdamW foreach=True handles them in one call" in trial["cause"]
        )
        if "unfixed-fused" in ran.verdicts:
            assert "AdamW fused=True" in ran.trial("unfixed-fused")["cause"]


class TestClipNorm:
    @pytest.fixture(params=["2", "4"])
    def ran(self, command: Command, request: pytest.FixtureRequest) -> Ran:
        need(NEW)
        need(PLAIN)
        return command.run("ep-clip-norm", "--cpu", request.param)

    def test_the_norm_of_own_pieces_differs_between_ranks(self, command: Command) -> None:
        need(NEW)
        ran = command.run("ep-clip-norm", variants=("own-pieces", "per-mesh", "no-clipping"))
        holds(ran)
        assert "each is the norm of what that rank holds" in ran.trial("own-pieces")["cause"]

    @pytest.mark.wide
    def test_every_variant_ends_as_measured(self, ran: Ran) -> None:
        holds(ran)
        assert (
            "The gradient norm is taken over DTensors of several meshes"
            in (ran.trial("unfixed")["cause"])
        )

    @pytest.mark.wide
    def test_the_parameters_covered_by_each_norm_are_found(self, ran: Ran) -> None:
        own, plain = ran.trial("own-pieces"), ran.trial("accelerate-plain-experts")
        assert "each is the norm of what that rank holds" in own["cause"]
        assert "each rank sums only its own experts (experts 0-" in plain["cause"]
        for trial in (own, plain):
            assert trial["signature"] == "replica-divergence:gradient norm:no-rank"
            assert (trial["culprits"], trial["victims"]) == ([], [])
            assert "The norm of the whole gradient is 3.2210 (single process)" in trial["cause"]


@pytest.mark.wide
class TestRouterGradient:
    def test_diverging_replicas_are_part_of_the_cause(self, command: Command) -> None:
        need(PLAIN)
        need(NEW)
        variants = ("unfixed", "masked-before-the-sum", "sum-before-mask")
        ran = command.run("ep-router-gradient", variants=variants)
        holds(ran)
        alike, apart = ran.trial("unfixed"), ran.trial("masked-before-the-sum")
        assert apart["signature"] == "wrong-gradients:replicas differ:no-rank"
        assert "differ between ranks that hold the same slice" in apart["cause"]
        assert "mlp.gate.weight" in apart["cause"]
        assert "all compute the same wrong result" in alike["cause"]
