"""Routing that changes in the recomputation, and proposed fixes, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from moediag.lab.step.models.rerouted import Rerouted, recomputing
from moediag.lab.step.models.tiny import Anatomy, MoeBlock
from moediag.lab.step.shard import activation_checkpointing
from moediag.recorder.not_applicable import NotApplicable

EXPERTS, TOKENS, WIDTH = 4, 12, 6


class Block(nn.Module):
    """The released loop: experts without tokens do not run, the router normalises in place."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.norm_topk_prob = True
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        hidden = hidden_states.reshape(-1, WIDTH)
        logits = self.gate(hidden)
        weights, chosen = torch.topk(F.softmax(logits, dim=1), self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            part = self.experts[number](hidden[token]) * weights[token, place, None]
            output.index_add_(0, token, part)
        return output.reshape(hidden_states.shape), logits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Linear(WIDTH, WIDTH)
        self.mlp = Block()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(torch.tanh(self.self_attn(hidden)))[0]


def layer(block: str = "released") -> tuple[Layer, Anatomy]:
    torch.manual_seed(3)
    built = Layer()
    experts = tuple((f"mlp.experts.{i}", e) for i, e in enumerate(built.mlp.experts))
    moe = MoeBlock("mlp", built.mlp, 0, experts)
    anatomy = Anatomy((("", built),), (moe,), EXPERTS)
    activation_checkpointing.rewritten(anatomy, block)
    return built, anatomy


def gradients(built: nn.Module, region: bool = True, **how: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step with the layer as a region; zero for a parameter without one."""
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))
    inputs.requires_grad_()
    out = checkpoint(built, inputs, use_reentrant=False, **how) if region else built(inputs)
    out.square().sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in built.named_parameters()
    }


def wrong(found: dict[str, torch.Tensor]) -> set[str]:
    right = gradients(layer()[0], region=False)
    return {n for n, g in found.items() if not torch.allclose(g, right[n], rtol=1e-4, atol=1e-6)}


def selective(save: str, **how: Any) -> Any:
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

    return partial(contexts, activation_checkpointing.SAVED[save], **how)


@pytest.mark.parametrize(
    ("change", "block", "said"),
    [
        ("count", "released", "A different number of tensors"),
        ("metadata", "released", "different metadata"),
        # Every expert runs: the number of tensors is equal, and the check still fails.
        ("count", "every-expert", "different metadata"),
    ],
)
def test_a_change_in_the_saved_tensors_raises(change: str, block: str, said: str) -> None:
    with Rerouted(change, EXPERTS).installed(), pytest.raises(CheckpointError, match=said):
        gradients(layer(block)[0])


@pytest.mark.parametrize("block", ["released", "not-in-place", "every-expert"])
def test_swapped_tokens_make_every_expert_silently_wrong(block: str) -> None:
    with Rerouted("permuted", EXPERTS).installed():
        found = wrong(gradients(layer(block)[0]))
    assert {f"mlp.experts.{i}.weight" for i in range(EXPERTS)} <= found
    with Rerouted("permuted", EXPERTS, pair=True).installed():
        fewer = wrong(gradients(layer(block)[0]))
    assert fewer, "two tokens are enough"


@pytest.mark.parametrize("change", ["none", "count", "metadata", "permuted"])
@pytest.mark.parametrize("block", ["released", "not-in-place", "every-expert"])
def test_without_checkpointing_gradients_are_correct(change: str, block: str) -> None:
    with Rerouted(change, EXPERTS).installed():
        assert not wrong(gradients(layer(block)[0], region=False))


def test_another_rank_recomputes_unchanged() -> None:
    topk = torch.topk
    with Rerouted("count", EXPERTS).installed(active=False):
        assert torch.topk is topk
        assert not wrong(gradients(layer()[0]))
    with Rerouted("count", EXPERTS).installed():
        assert torch.topk is not topk
    assert torch.topk is topk
    assert not recomputing()


def test_noise_repeats_if_the_random_state_is_restored() -> None:
    torch.manual_seed(11)
    with Rerouted("noise", EXPERTS).installed():
        right = gradients(layer()[0], region=False)
    torch.manual_seed(11)
    with Rerouted("noise", EXPERTS).installed():
        torch.manual_seed(11)
        found = gradients(layer()[0])
    assert all(torch.equal(g, right[n]) for n, g in found.items())


@pytest.mark.parametrize("change", ["count", "metadata", "permuted"])
def test_a_router_outside_the_region_is_correct(change: str) -> None:
    built, anatomy = layer()
    activation_checkpointing.router_outside(anatomy)
    with Rerouted(change, EXPERTS).installed():
        assert not wrong(gradients(built, region=False))  # it has its own regions


def test_regions_beside_an_excluded_router_are_recomputed() -> None:
    built, anatomy = layer()
    activation_checkpointing.router_outside(anatomy)
    seen: list[bool] = []
    for module in (built.self_attn, *built.mlp.experts, built.mlp.gate):
        module.register_forward_hook(lambda *_: seen.append(recomputing()))
    gradients(built, region=False)
    # Attention's hook runs outside of its region; each expert once in the forward and once again.
    assert seen.count(True) == EXPERTS
    assert seen.count(False) == EXPERTS + 2


@pytest.mark.parametrize("change", ["count", "permuted"])
def test_saving_the_top_k_is_correct_if_it_is_not_modified(change: str) -> None:
    with Rerouted(change, EXPERTS).installed():
        found = gradients(layer("not-in-place")[0], context_fn=selective("top-k"))
        assert not wrong(found)
        spared = gradients(layer("not-in-place")[0], context_fn=selective("nothing"), region=False)
        assert not wrong(spared)


def test_saving_a_top_k_normalised_in_place_is_wrong() -> None:
    with pytest.raises(RuntimeError, match="has been mutated"):
        gradients(layer()[0], context_fn=selective("top-k"))
    allowed = selective("top-k", allow_cache_entry_mutation=True)
    # Normalised twice: only the router's gradient shows it.
    found = wrong(gradients(layer()[0], context_fn=allowed))
    assert "mlp.gate.weight" in found
    assert not any("experts" in name for name in found)


def test_saving_the_matrix_products_does_not_help() -> None:
    with Rerouted("permuted", EXPERTS).installed():
        assert wrong(gradients(layer()[0], context_fn=selective("matmul")))


@pytest.mark.parametrize("change", ["count", "metadata"])
def test_a_tolerant_hook_fails_elsewhere_or_is_silently_wrong(change: str) -> None:
    with Rerouted(change, EXPERTS).installed():
        with (
            activation_checkpointing.tolerant_unpack("scalar"),
            pytest.raises(RuntimeError) as raised,
        ):
            gradients(layer()[0])
        assert not isinstance(raised.value, CheckpointError)
        with activation_checkpointing.tolerant_unpack("zeros") as tolerance:
            assert wrong(gradients(layer()[0]))
        assert tolerance.replaced > 0


@pytest.mark.parametrize("substitute", ["scalar", "zeros"])
def test_a_tolerant_hook_does_nothing_if_nothing_changes(substitute: str) -> None:
    with activation_checkpointing.tolerant_unpack(substitute) as tolerance:
        assert not wrong(gradients(layer()[0]))
    assert tolerance.replaced == 0
    # It cannot detect changes that keep the shape.
    with (
        Rerouted("permuted", EXPERTS).installed(),
        activation_checkpointing.tolerant_unpack(substitute) as tolerance,
    ):
        assert wrong(gradients(layer()[0]))
    assert tolerance.replaced == 0


def test_an_unsupported_block_is_not_applicable() -> None:
    built, anatomy = layer()
    built.mlp.gate = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(NotApplicable, match="not written for Block"):
        activation_checkpointing.router_outside(anatomy)
