"""The claims about skipped steps and metrics in flight, on real ranks: which are true, which
fixes are correct, and what a weaker detector would say about the wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence
from moediag.evidence.trial_folder import read_trial
from moediag.protocol import Outcome, StepReplicas
from moediag.result import Verdict
from tests.e2e.pipeline import FEW_IN_CI, Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]
STOPPED = ("hang", "collective-mismatch")


def run(command: Command, name: str, *variants: str, cpu: str = "2") -> Ran:
    need({"transformers": "5.17.0", "accelerate": "1.15.0"})
    ran = command.run(name, "--cpu", cpu, variants=variants)
    assert problems(ran.result) == []
    assert all(trial["met"] for trial in ran.result["trials"]), ran.verdicts
    assert ran.code == 0
    return ran


def weaker(ran: Ran, variant: str, change: Callable[[Outcome], Outcome]) -> Verdict:
    """Returns the verdict of a weaker detector on the same run."""
    evidence: Evidence = read_trial(ran.folder / variant)
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        ranks[rank] = replace(seen, outcome=change(seen.outcome))
    return diagnose(replace(evidence, ranks=ranks)).verdict


def until(step: int) -> Callable[[Outcome], Outcome]:
    """Everything except the optimizer's result, for the steps up to ``step``."""

    def cut(outcome: Outcome) -> Outcome:
        gradients = {s: g for s, g in outcome.gradients.items() if int(s) <= step}
        held = {s: r for s, r in outcome.replicas.items() if int(s) <= step}
        return replace(outcome, gradients=gradients, replicas=held, applied={})

    return cut


def only_that_it_ends(outcome: Outcome) -> Outcome:
    """Neither replicas nor weights, and gradients of the first step alone."""
    cut = until(1)(outcome)
    return replace(cut, replicas={s: StepReplicas() for s in cut.replicas})


class TestNonfiniteSkip:
    @pytest.fixture
    def few(self, command: Command) -> Ran:
        return run(
            command, "nonfinite-skip", "unfixed", "own-norm-muon", "own-norm-adamw",
            "adamw-zeros-then-step", "adamw-agree",
        )  # fmt: skip

    @pytest.fixture
    def others(self, command: Command) -> Ran:
        return run(
            command, "nonfinite-skip", "global-norm-row", "own-norm-muon", "own-norm-adamw",
            "muon-zeros-then-step", "muon-agree", "adamw-none-then-step", "adamw-global-norm",
            "no-overflow",
        )  # fmt: skip

    @pytest.fixture
    def ran(self, runs: str, request: pytest.FixtureRequest) -> Ran:
        found: Ran = request.getfixturevalue(runs)
        return found

    @pytest.mark.parametrize(
        ("runs", "variant"),
        [("few", "unfixed"), pytest.param("others", "global-norm-row", marks=pytest.mark.wide)],
    )
    def test_the_claim_is_not_reproduced_with_a_global_norm(self, ran: Ran, variant: str) -> None:
        trial = ran.trial(variant)
        assert (trial["verdict"], trial["tables"]) == ("clean", [])
        assert trial["gradient_error"] < 1e-6

    def test_muon_hangs_because_of_the_skipped_step(self, few: Ran) -> None:
        trial = few.trial("own-norm-muon")
        assert trial["verdict"] in STOPPED
        assert trial["cause"].endswith(
            "Before it, rank 1 skipped optimizer.step() (gradient norm not finite), rank 0 took "
            "optimizer.step()."
        )
        assert {side["op"] for side in trial["first_divergence"]["ranks"].values()} == {
            "all_reduce", "all_gather",
        }  # fmt: skip

    def test_adamw_is_silent_and_its_step_counts_diverge(self, few: Ran) -> None:
        trial = few.trial("own-norm-adamw")
        assert trial["signature"] == "replica-divergence:optimizer steps:no-rank"
        assert "rank 0 2, rank 1 1" in trial["cause"]
        evidence = read_trial(few.folder / "own-norm-adamw")
        last = [evidence.ranks[r].outcome.replicas["4"] for r in (0, 1)]  # type: ignore[union-attr]
        assert [facts.optimizer_steps for facts in last] == [[4.0, 4.0], [3.0, 3.0]]
        assert last[0].learning_rates != last[1].learning_rates

    @pytest.mark.parametrize(
        ("runs", "variant"),
        [
            ("few", "adamw-zeros-then-step"),
            pytest.param("others", "muon-zeros-then-step", marks=pytest.mark.wide),
        ],
    )
    def test_zero_gradients_on_one_rank_only_change_the_weights(
        self, ran: Ran, variant: str
    ) -> None:
        assert ran.trial(variant)["signature"] == "wrong-weights:weights after the step:no-rank"
        # It finishes, step counts and learning rates agree, the gradients of the step are correct.
        assert weaker(ran, variant, until(2)) == Verdict.CLEAN

    @pytest.mark.wide
    def test_none_then_step_changes_nothing_for_adamw(self, others: Ran) -> None:
        trial, unfixed = others.trial("adamw-none-then-step"), others.trial("own-norm-adamw")
        assert trial["signature"] == unfixed["signature"]
        assert weaker(others, "adamw-none-then-step", only_that_it_ends) == Verdict.CLEAN

    @pytest.mark.parametrize(
        ("runs", "right"),
        [
            ("few", {"adamw-agree"}),
            pytest.param("others", {"muon-agree", "adamw-global-norm"}, marks=pytest.mark.wide),
        ],
    )
    def test_agreement_between_ranks_is_correct(self, ran: Ran, right: set[str]) -> None:
        assert {name for name, correct in ran.fixes.items() if correct} == right


class TestZeroGrad:
    @pytest.fixture(params=FEW_IN_CI)
    def ran(self, command: Command, request: pytest.FixtureRequest) -> Ran:
        few = ("unfixed", "schedule-advances", "set-to-none")
        return run(command, "zero-grad-noop", *(few if request.param == "few" else ()))

    def test_zero_gradients_move_the_weights_and_none_does_not(self, ran: Ran) -> None:
        assert ran.reproduced is True
        assert all(ran.fixes.values()) and len(ran.fixes) == (4 if "muon" in ran.verdicts else 1)
        for variant in {"unfixed", "sgd-momentum", "muon"} & set(ran.verdicts):
            assert "After step 3 the weights of 3 of 3 parameters" in ran.trial(variant)["cause"]
            assert weaker(ran, variant, until(3)) == Verdict.CLEAN

    def test_a_schedule_that_advances_without_an_update(self, ran: Ran) -> None:
        trial = ran.trial("schedule-advances")
        assert "the learning rate is 0.01458 on ranks 0, 1 and should be 0.0162" in trial["cause"]
        assert weaker(ran, "schedule-advances", until(3)) == Verdict.CLEAN


@pytest.mark.wide
class TestMetrics:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        return run(
            command, "metrics-in-flight", "unfixed", "fewer-micro-batches", "missing-key",
            "other-order", "after-the-loop", "after-the-loop-fsdp2", "padded-fsdp2",
            "missing-key-zero", "missing-key-counted", "other-order-sorted", "after-equal",
        )  # fmt: skip

    def test_equal_reductions_inside_the_loop_do_not_deadlock(self, ran: Ran) -> None:
        assert ran.verdicts["unfixed"] == "clean"
        assert ran.trial("unfixed")["parameters_compared"] == 3

    def test_fewer_micro_batches(self, ran: Ran) -> None:
        for variant in ("fewer-micro-batches", "after-the-loop-fsdp2"):
            trial = ran.trial(variant)
            assert trial["verdict"] in STOPPED
            assert "rank 1 has 2 micro-batches, rank 0 has 3 micro-batches" in trial["cause"]
            assert "micro-batches" in trial["signature"].split(":")
        assert ran.fixes["after-the-loop"] and ran.fixes["padded-fsdp2"]

    def test_a_missing_metric_is_reported(self, ran: Ran) -> None:
        trial = ran.trial("missing-key")
        assert trial["verdict"] in STOPPED
        assert trial["cause"].endswith("Before it, rank 1 has no metric `kl`.")

    def test_a_different_order_only_swaps_metrics(self, ran: Ran) -> None:
        trial = ran.trial("other-order")
        assert trial["verdict"] == "wrong-metrics"
        assert "What rank 0 calls `loss` is what rank 1 calls `kl`." in trial["cause"]
        assert "loss, kl, entropy on rank 0; kl, loss, entropy on rank 1" in trial["cause"]
        assert trial["gradient_error"] < 1e-6
        # Gradients and replicas accept it.
        assert weaker(ran, "other-order", lambda o: replace(o, metrics={})) == Verdict.CLEAN

    def test_a_zero_for_a_missing_metric_is_found_only_by_the_reference(self, ran: Ran) -> None:
        trial = ran.trial("missing-key-zero")
        assert trial["signature"] == "wrong-metrics:metrics equal on all ranks:no-rank"
        # Ranks side by side accept it: they agree.
        blind = weaker(ran, "missing-key-zero", lambda o: replace(o, reference_metrics={}))
        assert blind == Verdict.CLEAN
        assert ran.fixes["missing-key-counted"] and not ran.fixes["missing-key-zero"]


@pytest.mark.wide
def test_the_rank_of_four_that_skips_is_the_culprit(command: Command) -> None:
    ran = run(command, "nonfinite-skip", "own-norm-adamw", cpu="4")
    assert ran.trial("own-norm-adamw")["culprits"] == [3]
