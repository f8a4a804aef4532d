"""The compiled Triton kernels on a GPU: the checks of tests/unit, and larger weights."""

from __future__ import annotations

import pytest
import torch

from moediag.lab.step import kernels
from tests.unit import kernel_checks as checks

pytestmark = pytest.mark.gpu
ROUTED = torch.tensor([[0, 6], [6, 6], [5, 0], [6, 2], [2, 5]])


@pytest.fixture(autouse=True)
def compiled() -> None:
    pytest.importorskip("triton", reason="this torch came without triton")
    if kernels.load().INTERPRETED:
        pytest.skip(f"{kernels.ENV_INTERPRET} is set: nothing would be compiled")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [700, 0, 0], [0, 1, 699], [128, 256, 64], [5, 0, 17, 33, 0, 1]], ids=str
)
def test_kernel_matches_a_loop(counts: list[int], dtype: torch.dtype, transposed: bool) -> None:
    checks.against_a_loop(counts, 19, 200, 264, dtype, transposed, "cuda")


def test_kernel_accepts_sizes_that_fit_no_block() -> None:
    checks.against_a_loop([31, 0, 77], 5, 37, 41, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_function_matches_a_loop(transposed: bool, biased: bool) -> None:
    checks.experts_function(ROUTED, transposed, biased, device="cuda")


def test_a_weight_may_exceed_32_bit_addresses() -> None:
    """2^31 elements and more: the last expert must read and write its own."""
    experts, outer, inner = 129, 4096, 4096
    wanted = 3 * experts * outer * inner * 2
    free, _ = torch.cuda.mem_get_info()
    if free < wanted:
        pytest.skip(f"{free} bytes free, {wanted} wanted")
    grouped = kernels.load()
    weight = torch.zeros(experts, outer, inner, dtype=torch.bfloat16, device="cuda")
    weight[-1] = torch.eye(outer, dtype=torch.bfloat16, device="cuda")
    weight.requires_grad_()
    x = torch.randn(64, inner, device="cuda").bfloat16().requires_grad_()
    offsets = torch.tensor([0] * (experts - 1) + [64], device="cuda")
    y = grouped.linear(x, weight, grouped.groups_for(x, offsets))
    assert torch.equal(y, x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not weight.grad[:-1].any()
    expected = x.detach().float().sum(0)
    assert torch.allclose(weight.grad[-1, 0].float(), expected, rtol=1e-2, atol=1e-1)
