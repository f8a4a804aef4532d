"""Adapters of experts with the axes of an older PEFT."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from scenarios.programs import expert_adapters

EXPERTS, RANK, INPUTS, OUTPUTS = 4, 2, 6, 10


def product(pair: tuple[torch.Tensor, torch.Tensor], old: bool) -> torch.Tensor:
    """What PEFT adds to the experts, (experts, OUTPUTS, INPUTS): rows of lora_A by expert, columns
    of lora_B by rank. The old PEFT has inputs and outputs the other way round."""
    a, b = pair
    rows, columns = a.reshape(EXPERTS, RANK, -1), b.reshape(-1, RANK, EXPERTS)
    return torch.einsum("ore,eri->eio" if old else "ore,eri->eoi", columns, rows)


@pytest.fixture
def saved() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(EXPERTS * RANK, INPUTS, generator=generator)
    return a, torch.randn(OUTPUTS, EXPERTS * RANK, generator=generator)


def test_an_old_file_has_the_same_product(saved: tuple[torch.Tensor, torch.Tensor]) -> None:
    old = expert_adapters.FILES["old"](*saved, EXPERTS)
    assert [tuple(t.shape) for t in old] == [(EXPERTS * RANK, OUTPUTS), (INPUTS, EXPERTS * RANK)]
    torch.testing.assert_close(product(old, old=True), product(saved, old=False))


def test_converted_it_is_the_file_itself(saved: tuple[torch.Tensor, torch.Tensor]) -> None:
    converted = expert_adapters.FILES["old-converted"](*saved, EXPERTS)
    assert all(map(torch.equal, converted, saved))


def test_exchanging_the_tensors_mixes_experts(saved: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = expert_adapters.FILES["old-exchanged"](*saved, EXPERTS)
    assert [t.shape for t in found] == [t.shape for t in saved]
    assert not torch.allclose(product(found, old=False), product(saved, old=False))
