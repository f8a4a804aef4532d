"""Checkpointing, tied embeddings and router guards on real ranks: each claim, each fix.

For every wrong fix the tests also show a weaker detector that would have accepted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moediag.protocol import Outcome, outcome_file
from tests.e2e.pipeline import Command, Ran, need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]
OLD, NEW = {"transformers": "4.53.2"}, {"transformers": "5.23.0", "accelerate": "1.15.0"}
WORSE, NO_EFFECT, WRONG, RIGHT = "makes it worse", "no effect", "wrong", "right"


def run(command: Command, scenario: str, *variants: str) -> Ran:
    ran = command.run(scenario, variants=variants)
    assert ran.code == 0, ran.progress
    return ran


def effects(ran: Ran) -> dict[str, str]:
    return {fix["variant"]: fix["effect"] for fix in ran.result["conclusion"]["fixes"]}


def claims(ran: Ran) -> dict[str, bool | None]:
    return {c["variant"]: c["reproduced"] for c in ran.result["conclusion"]["claims"]}


def why(ran: Ran, variant: str) -> str:
    (found,) = [f for f in ran.result["conclusion"]["fixes"] if f["variant"] == variant]
    return str(found["why"])


def outcomes(ran: Ran, variant: str) -> list[Outcome]:
    folder = ran.folder / variant
    return [Outcome.read(folder / outcome_file(rank)) for rank in range(2)]


def nothing_raised(ran: Ran, variant: str) -> bool:
    """A detector that waits for an exception or a hang."""
    return all((ran.folder / variant / outcome_file(rank)).exists() for rank in range(2))


def loss_is_right(ran: Ran, variant: str) -> bool:
    """A detector that compares the loss of the first step with the right one."""
    found = outcomes(ran, variant)
    mean = sum(outcome.losses[0] for outcome in found) / len(found)
    return abs(mean - found[0].reference_losses[0]) < 1e-5


def ranks_agree(ran: Ran, variant: str) -> bool:
    """A detector that compares the ranks with each other."""
    first, second = outcomes(ran, variant)
    return first.gradient_norms == pytest.approx(second.gradient_norms, rel=1e-6)


def accepted(ran: Ran, variants: Sequence[str]) -> bool:
    weak: Sequence[Any] = (nothing_raised, loss_is_right, ranks_agree)
    return all(detector(ran, variant) for variant in variants for detector in weak)


@pytest.mark.wide
class TestRecompute:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need(OLD)
        return run(
            command, "checkpoint-recompute", "different-counts", "different-metadata", "permuted",
            "permuted-two", "every-expert", "every-expert-permuted", "dense-experts", "reentrant",
            "reentrant-counts", "save-matmul", "save-matmul-permuted", "save-top-k-in-place",
            "save-top-k-mutable", "save-top-k", "save-top-k-permuted", "router-outside",
            "router-outside-permuted", "same-routing", "no-checkpointing",
        )  # fmt: skip

    def test_every_symptom_is_reproduced(self, ran: Ran) -> None:
        assert set(claims(ran).values()) == {True}
        assert "A different number of tensors" in ran.trial("different-counts")["cause"]
        assert "different metadata" in ran.trial("different-metadata")["cause"]
        all_of_them, two = ran.trial("permuted"), ran.trial("permuted-two")
        assert len(all_of_them["wrong_parameters"]) > len(two["wrong_parameters"]) > 0
        assert accepted(ran, ["permuted", "permuted-two"])

    def test_each_fix_has_its_effect(self, ran: Ran) -> None:
        assert effects(ran) == {
            "every-expert": NO_EFFECT,
            "every-expert-permuted": NO_EFFECT,
            "dense-experts": WORSE,
            "reentrant": WORSE,
            "reentrant-counts": WORSE,
            "save-matmul": WRONG,
            "save-matmul-permuted": WRONG,
            "save-top-k-in-place": WRONG,
            "save-top-k-mutable": WORSE,
            "save-top-k": RIGHT,
            "save-top-k-permuted": RIGHT,
            "router-outside": RIGHT,
            "router-outside-permuted": RIGHT,
        }

    def test_a_check_of_the_error_text_would_accept_the_refuted_fix(self, ran: Ran) -> None:
        before, after = ran.trial("different-counts"), ran.trial("every-expert")
        assert "different number" in before["cause"]
        assert "different number" not in after["cause"]
        assert "only the error's text changed" in why(ran, "every-expert")

    def test_silently_wrong_fixes_pass_every_weaker_check(self, ran: Ran) -> None:
        silent = ["every-expert-permuted", "dense-experts", "reentrant", "save-matmul-permuted"]
        assert accepted(ran, [*silent, "save-top-k-mutable"])
        # The experts' gradients alone would have accepted this one.
        assert not any("experts" in p for p in ran.trial("save-top-k-mutable")["wrong_parameters"])

    def test_fixes_that_raise_raise_another_error(self, ran: Ran) -> None:
        for variant in ("reentrant-counts", "save-matmul", "save-top-k-in-place"):
            assert "CheckpointError" not in ran.trial(variant)["signature"]

    def test_the_result_notes_the_changed_router(self, ran: Ran) -> None:
        assert any("bent on purpose" in note for note in ran.trial("permuted")["notes"])
        assert not any("bent" in note for note in ran.trial("same-routing")["notes"])


class TestNoise:
    def test_a_noisy_router_needs_its_random_state(self, command: Command) -> None:
        need(OLD)
        names = ("noise", "preserve-rng", "router-outside-noise", "same-routing")
        ran = run(command, "checkpoint-recompute", *names)
        assert claims(ran) == {"noise": True}
        assert effects(ran) == {"preserve-rng": RIGHT, "router-outside-noise": RIGHT}


@pytest.mark.wide
class TestFused:
    def test_an_error_with_separate_experts_is_silent_with_fused_experts(
        self, command: Command
    ) -> None:
        need(NEW)
        names = ("fused-experts", "router-outside-fused", "same-routing-fused")
        ran = run(command, "checkpoint-recompute", *names)
        assert claims(ran) == {"fused-experts": True}
        assert effects(ran) == {"router-outside-fused": RIGHT}
        assert accepted(ran, ["fused-experts"])


@pytest.mark.wide
class TestTolerantHook:
    def test_the_tolerant_hook_fails_elsewhere_or_is_silently_wrong(self, command: Command) -> None:
        need(OLD)
        ran = run(command, "tolerant-unpack-hook")
        assert effects(ran) == {
            "scalar-counts": NO_EFFECT,
            "scalar-metadata": NO_EFFECT,
            "zeros-counts": WORSE,
            "zeros-metadata": WORSE,
            "router-outside": RIGHT,
        }
        for variant in ("scalar-counts", "scalar-metadata"):
            # A detector that looks for the original error would have called it fixed.
            assert "CheckpointError" not in ran.trial(variant)["cause"]
            assert "from CheckpointError to RuntimeError" in why(ran, variant)
        assert accepted(ran, ["zeros-counts", "zeros-metadata"])
        assert any("were replaced on rank 1" in n for n in ran.trial("zeros-counts")["notes"])


@pytest.mark.wide
class TestTied:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need(OLD)
        return run(command, "tied-embeddings-meta")

    def test_untied_embeddings_are_wrong_or_hang_and_tied_ones_are_correct(self, ran: Ran) -> None:
        assert set(claims(ran).values()) == {True}
        assert effects(ran) == {
            "memory-after-sharding": RIGHT,
            "tie-again-before-sharding": RIGHT,
            "tie-again-both-names": RIGHT,
            "tie-again-on-all-ranks": RIGHT,
            "tie-after-loading": RIGHT,
            "tie-after-loading-ranks": NO_EFFECT,
            "both-names-in-the-checkpoint": WRONG,
            "accelerate": WRONG,
        }

    def test_an_empty_output_layer_makes_all_tokens_equally_likely(self, ran: Ran) -> None:
        trial = ran.trial("embedding-only")
        assert any("the loss of step 1 is ln 128" in note for note in trial["notes"])
        assert "lm_head.weight" in trial["cause"]
        assert nothing_raised(ran, "embedding-only")
        assert ranks_agree(ran, "embedding-only")
        assert not loss_is_right(ran, "embedding-only")

    def test_two_parameters_instead_of_one_pass_checks_of_loss_weights_and_ranks(
        self, ran: Ran
    ) -> None:
        for variant in ("both-names", "both-names-in-the-checkpoint"):
            trial = ran.trial(variant)
            assert accepted(ran, [variant])
            assert trial["verdict"] != "wrong-weights", "every weight is the checkpoint's"
            assert trial["wrong_parameters"] == ["model.embed_tokens.weight", "lm_head.weight"]

    def test_other_failures_do_not_raise_the_unfixed_error(self, ran: Ran) -> None:
        assert ran.trial("accelerate")["verdict"] == "crash"
        assert "no error" not in ran.trial("tie-after-loading-ranks")["cause"]
        assert not nothing_raised(ran, "tie-after-loading-ranks")


class TestGuards:
    def test_a_guard_by_another_name_is_wrong(self, command: Command) -> None:
        need(OLD)
        ran = run(command, "router-logits-guard", "num-local-experts", "own-switch")
        assert claims(ran) == {"num-local-experts": True}
        assert effects(ran) == {"own-switch": RIGHT}

    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need(OLD)
        return run(
            command, "router-logits-guard", "num-local-experts", "num-experts", "n-routed-experts",
            "any", "own-switch", "always",
        )  # fmt: skip

    @pytest.mark.wide
    def test_the_correct_guards(self, ran: Ran) -> None:
        assert claims(ran) == {"num-local-experts": True}
        assert effects(ran) == {
            "num-experts": WRONG,
            "n-routed-experts": WRONG,
            "any": WRONG,
            "own-switch": RIGHT,
        }

    @pytest.mark.wide
    def test_the_table_has_every_configuration_class(self, ran: Ran) -> None:
        table, others = ran.trial("always")["tables"][:2]
        assert table["columns"][3:] == ["num", "local", "routed", "any", "text", "switch"]
        rows = {row[0]: row[3:] for row in table["rows"]}
        assert rows["Qwen3MoeConfig"] == ["on", "OFF", "OFF", "on", "on", "on"]
        assert rows["MixtralConfig"] == ["OFF", "on", "OFF", "on", "on", "on"]
        assert rows["DbrxConfig"] == ["OFF", "OFF", "OFF", "OFF", "OFF", "on"]
        assert ["DeepseekV3Config", "n_routed_experts", "no auxiliary loss"] in others["rows"]

    @pytest.mark.wide
    def test_a_check_of_one_family_would_accept_wrong_guards(self, ran: Ran) -> None:
        for variant, family in (("num-experts", "Qwen3Moe"), ("any", "Mixtral")):
            wrong = ran.trial(variant)["wrong_parameters"]
            assert wrong
            assert not any(name.startswith(family) for name in wrong)
        assert nothing_raised(ran, "n-routed-experts")

    @pytest.mark.wide
    def test_qwen3_has_both_names_in_the_newest_release(self, command: Command) -> None:
        need(NEW)
        ran = run(
            command, "router-logits-guard", "num-local-experts-5-23", "any-5-23",
            "any-in-text-config-5-23", "own-switch-5-23", "always-5-23",
        )  # fmt: skip
        table = ran.trial("always-5-23")["tables"][0]
        rows = {row[0]: row[3:] for row in table["rows"]}
        assert rows["Qwen3MoeConfig"] == ["on", "on", "OFF", "on", "on", "on"]
        assert rows["Qwen2MoeConfig"] == ["on", "OFF", "OFF", "on", "on", "on"]
        assert rows["Qwen3VLMoeConfig"] == ["OFF", "OFF", "OFF", "OFF", "on", "on"]
        assert effects(ran) == {
            "any-5-23": WRONG,
            "any-in-text-config-5-23": RIGHT,
            "own-switch-5-23": RIGHT,
        }
