"""Expert parallelism by hand: each token reaches its experts and comes back, gradients with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from moediag.lab.step.models.tiny import Anatomy, MoeBlock  # noqa: E402
from moediag.lab.step.shard import dispatch  # noqa: E402
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402
from tests.forked_ranks import on_ranks  # noqa: E402

EXPERTS, WIDTH, TOKENS, TOP_K = 4, 3, 5, 2


class Experts(nn.Module):
    """As transformers has them from 5.0 on: one 3-D parameter, a loop over the experts hit."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator))

    def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            computed = torch.tanh(hidden[token] @ self.up[expert]) * weights[token, place, None]
            result = result.index_add(0, token, computed)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()


def anatomy(block: Block) -> Anatomy:
    return Anatomy((), (MoeBlock("mlp", block, 0, ()),), EXPERTS)


def batch(rank: int) -> tuple[Any, Any, Any]:
    """Hidden states, experts of each token, their weights. Rank 1 sends none to expert 0."""
    generator = torch.Generator().manual_seed(rank + 1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, 0] -= 2 * rank
    weights, index = scores.topk(TOP_K)
    return hidden, index, weights.requires_grad_()


def loss(experts: nn.Module, rank: int) -> tuple[Any, Any, Any]:
    hidden, index, weights = batch(rank)
    result = experts(hidden, index, weights)
    result.square().sum().backward()
    return result.detach(), hidden.grad, weights.grad


def of_rank(rank: int) -> tuple[Any, ...]:
    block = Block()
    rows = dispatch.divide(anatomy(block), dist.group.WORLD)
    assert rows == {"mlp.experts.up": (2 * rank, 2 * rank + 2)}
    assert block.experts.up.shape == (2, WIDTH, WIDTH)
    return (*loss(block.experts, rank), block.experts.up.grad)


def test_two_ranks_give_the_results_and_gradients_of_one(tmp_path: Path) -> None:
    results = on_ranks(2, tmp_path, of_rank)
    whole = Experts()
    for rank, (*found, _) in enumerate(results):
        for one, other in zip(found, loss(whole, rank), strict=True):
            assert torch.allclose(one, other, atol=1e-6), rank
    for rank, (*_, gradient) in enumerate(results):
        assert torch.allclose(gradient, whole.up.grad[2 * rank : 2 * rank + 2], atol=1e-6)


class TestNotDivisible:
    @pytest.fixture(autouse=True)
    def world(self) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
        yield
        dist.destroy_process_group()

    def test_an_indivisible_number_of_experts_is_not_applicable(self) -> None:
        with pytest.raises(NotApplicable, match="4 experts cannot be divided over 3 ranks"):
            dispatch.divide(anatomy(Block()), dist.group.WORLD)

    def test_experts_that_are_modules_are_not_applicable(self) -> None:
        listed = tuple((str(n), nn.Linear(2, 2)) for n in range(EXPERTS))
        modules = Anatomy((), (MoeBlock("mlp", Block(), 0, listed),), EXPERTS)
        with pytest.raises(NotApplicable, match="experts are modules in this release"):
            dispatch.divide(modules, dist.group.WORLD)
