"""The training state of all ranks put together, and its way into a model with another layout."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moediag.lab.step.measure import training_state
from moediag.recorder.not_applicable import NotApplicable

SHAPES = {"weight": (4, 6), "bias": (6,)}


class Cut:
    """A rank with one of ``ranks`` equal pieces of each weight along ``dim``, and whole biases."""

    tells_slices = True

    def __init__(self, rank: int, ranks: int, dim: int) -> None:
        self.rank, self.ranks, self.dim = rank, ranks, dim
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(self.piece(torch.zeros(4, 6)))
        self.model.bias = torch.nn.Parameter(torch.zeros(6))
        self.own_optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def piece(self, whole: Any) -> Any:
        return whole.chunk(self.ranks, self.dim)[self.rank].clone()

    def weights(self) -> Iterator[Any]:
        yield "weight", self.model.weight.detach(), self.piece
        yield "bias", self.model.bias.detach(), lambda whole: whole

    def trained(self, whole: torch.Tensor, bias: torch.Tensor) -> Cut:
        """Runs a step, whose moments depend on the place of each element in the whole."""
        self.model.weight.grad, self.model.bias.grad = self.piece(whole), bias.clone()
        self.own_optimizer.step()
        return self


@pytest.fixture
def gradients() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)


@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (2, 0), (2, 1), (3, 1), (4, 0)])
def test_a_state_at_one_layout_equals_that_of_the_same_step_at_another(
    gradients: tuple[Any, Any], ranks: int, dim: int
) -> None:
    saved: list[Any] = [Cut(rank, 2, 1).trained(*gradients) for rank in range(2)]
    whole = training_state.put_together(
        (training_state.parts(one, SHAPES) for one in saved), SHAPES
    )
    for rank in range(ranks):
        placed: Any = Cut(rank, ranks, dim)
        training_state.place(whole, placed)
        straight: Any = Cut(rank, ranks, dim).trained(*gradients)
        found = training_state.difference(training_state.of(straight), training_state.of(placed))
        assert (found.weights, found.optimizer, found.compared) == ({}, {}, 8)


def test_a_copied_step_count_is_not_shared(gradients: tuple[Any, Any]) -> None:
    saved: Any = Cut(0, 1, 0).trained(*gradients)
    placed: Any = Cut(0, 1, 0)
    training_state.place(
        training_state.put_together([training_state.parts(saved, SHAPES)], SHAPES), placed
    )
    placed.trained(*gradients)
    steps = [o.own_optimizer.state[o.model.bias]["step"].item() for o in (saved, placed)]
    assert steps == [1, 2]


def test_flat_parameters_do_not_say_which_part_they_are() -> None:
    trial = SimpleNamespace(wrapper=SimpleNamespace(kind="fsdp1"))
    flat: Any = SimpleNamespace(tells_slices=False, trial=trial)
    with pytest.raises(NotApplicable, match="fsdp1 does not say"):
        training_state.gathered(flat)
