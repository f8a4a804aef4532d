"""The grouped kernels through Triton's interpreter: against one expert after the other in fp64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.lab.step import kernels
from tests.unit import kernel_checks as checks

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: make setup brings it on Linux", allow_module_level=True)
if torch.cuda.is_available():
    reason = "kernels are compiled here: tests/gpu asks them the same"
    pytest.skip(reason, allow_module_level=True)
kernels.interpret()
grouped = kernels.load()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    tail=st.integers(0, 20),
    inner=st.integers(1, 40),
    outer=st.integers(1, 40),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernel_matches_a_loop_for_any_sizes(
    counts: list[int], tail: int, inner: int, outer: int, transposed: bool, seed: int
) -> None:
    checks.against_a_loop(counts, tail, inner, outer, transposed=transposed, seed=seed)


@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [35, 0, 0], [0, 0, 35], [16, 16, 16], [1, 0, 17]],
    ids=["no-rows", "first-has-all", "last-has-all", "whole-blocks", "one-and-none"],
)  # fmt: skip
@pytest.mark.parametrize("tail", [0, 19])
def test_kernel_matches_a_loop_at_block_edges(counts: list[int], tail: int) -> None:
    checks.against_a_loop(counts, tail, 20, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_two_byte_types_are_summed_in_fp32(dtype: torch.dtype, transposed: bool) -> None:
    # 300 terms of about 1: a sum in bf16 itself would be off by whole numbers.
    checks.against_a_loop([21, 0, 40], 3, 300, 17, dtype, transposed)


def test_gradients_of_one_weight_used_twice_add_up() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 8, 8, requires_grad=True)
    x = torch.randn(6, 8)
    groups = grouped.groups_for(x, torch.tensor([4, 6]))
    twice = grouped.linear(grouped.linear(x, weight, groups), weight, groups)
    twice.sum().backward()
    right = weight.detach().double().requires_grad_()
    y = checks.loop(x.double(), right, [4, 2], False)
    checks.loop(y, right, [4, 2], False).sum().backward()
    assert torch.allclose(weight.grad.double(), right.grad, rtol=1e-4, atol=1e-4)


def test_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(9, 2, 12), torch.randn(12, 10, 3).permute(2, 1, 0)
    x = wide[:, 1]
    groups = grouped.groups_for(x, torch.tensor([2, 2, 9]))
    y = grouped.linear(x, weight, groups)
    expected = checks.loop(x.double(), weight.double(), [2, 0, 7], False)
    assert torch.allclose(y.double(), expected, atol=1e-5)


def test_mismatched_sizes_are_refused() -> None:
    x, weight = torch.randn(4, 8), torch.randn(2, 8, 8)
    groups = grouped.groups_for(x, torch.tensor([1, 4]))
    for bad in (
        lambda: grouped.linear(x.double(), weight.double(), groups),
        lambda: grouped.linear(x.bfloat16(), weight, groups),
        lambda: grouped.linear(x[:3], weight, groups),
        lambda: grouped.linear(x, weight[:1], groups),
        lambda: grouped.linear(x, weight[..., :5], groups),
    ):
        with pytest.raises(ValueError, match=r"rows|experts"):
            bad()


ROUTED = {
    "balanced": torch.arange(20).reshape(10, 2) % 6,
    "one-hot": torch.tensor([[4, 1]] * 7),
    "some-foreign": torch.tensor([[0, 6], [6, 6], [5, 0], [6, 2], [2, 5]]),
    "all-foreign": torch.full((5, 2), 6),
}


@pytest.mark.parametrize("routing", ROUTED)
def test_experts_function_matches_a_loop(routing: str) -> None:
    checks.experts_function(ROUTED[routing])


@pytest.mark.parametrize(
    ("transposed", "biased", "gated"),
    [(True, False, True), (False, True, True), (True, True, False)],
)
def test_experts_function_accepts_every_layout(transposed: bool, biased: bool, gated: bool) -> None:
    checks.experts_function(ROUTED["some-foreign"], transposed, biased, gated)


COMPILE = Path(__file__).parent.parent / "compiled_kernels.py"


def test_the_kernels_compile_for_a_missing_gpu(tmp_path: Path) -> None:
    """ptxas comes with triton, so GPU code can be compiled and examined without a GPU."""
    variables = {k: v for k, v in os.environ.items() if k != kernels.ENV_INTERPRET}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(COMPILE)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor cores") == 3  # both products with the weight, and its gradient
