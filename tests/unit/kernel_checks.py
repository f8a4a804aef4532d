"""Checks of the grouped kernels, interpreted on the CPU or compiled on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from moediag.lab.step import kernels

# Half a unit in the last place of what is stored, and one more for the fp32 sum before.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def loop(
    x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], transposed: bool
) -> torch.Tensor:
    """One expert after the other; rows of no expert are zero."""
    outer = weight.shape[2 if transposed else 1]
    parts, begin = [], 0
    for expert, count in enumerate(counts):
        matrix = weight[expert] if transposed else weight[expert].T
        parts.append(x[begin : begin + count] @ matrix)
        begin += count
    parts.append(x.new_zeros(x.shape[0] - begin, outer))
    return torch.cat(parts)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Unwritten memory is filled with nan."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # Counts are integers, so their sums do not depend on the order.
            warnings.filterwarnings("ignore", message=".*does not have a deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, terms: int) -> None:
    """``terms``: how many products were summed, each of size about 1."""
    bound = ROUNDING[dtype] * expected.abs() + 2.0**-20 * terms
    assert actual.dtype == dtype
    excess = (actual.cpu().double() - expected.cpu()).abs() - bound.cpu()
    assert bool((excess <= 0).all()), float(excess.max())  # nan fails too


def against_a_loop(
    counts: Sequence[int],
    tail: int,
    inner: int,
    outer: int,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Forward and both gradients, with nan in rows of no expert and in unwritten memory."""
    grouped = kernels.load()
    torch.manual_seed(seed)
    rows, experts = sum(counts) + tail, len(counts)
    shape = (experts, inner, outer) if transposed else (experts, outer, inner)
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(shape).to(dtype)
    dy = torch.randn(rows, outer).to(dtype)
    right = [t.double().requires_grad_() for t in (x, weight)]
    expected = loop(*right, counts, transposed)
    expected.backward(dy.double())

    x[rows - tail :] = dy[rows - tail :] = float("nan")
    x, weight = (t.to(device).requires_grad_() for t in (x, weight))
    offsets = torch.tensor(counts).cumsum(0).to(device)
    with poisoned_memory():
        y = grouped.linear(x, weight, grouped.groups_for(x, offsets), transposed)
        y.backward(dy.to(device))
    assert x.grad is not None
    assert weight.grad is not None
    close(y, expected, dtype, inner)
    close(x.grad, right[0].grad, dtype, outer)
    close(weight.grad, right[1].grad, dtype, max([1, *counts]))
    assert not y[rows - tail :].any()
    assert not x.grad[rows - tail :].any()
    for expert, count in enumerate(counts):
        assert count or not weight.grad[expert].any()


class Experts(torch.nn.Module):
    """The attributes of transformers' experts modules, and the same as a loop."""

    def __init__(
        self, experts: int, hidden: int, width: int, transposed: bool, biased: bool, gated: bool
    ) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = experts, transposed
        self.has_bias, self.has_gate = biased, gated
        self.act_fn = F.silu
        first, wide = ("gate_up_proj", 2 * width) if gated else ("up_proj", width)
        self.first = first
        for name, outer, inner in ((first, wide, hidden), ("down_proj", hidden, width)):
            size = (experts, inner, outer) if transposed else (experts, outer, inner)
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size) / inner**0.5))
            if biased:
                bias = torch.nn.Parameter(torch.randn(experts, outer))
                self.register_parameter(f"{name}_bias", bias)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _linear(self, name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = getattr(self, name)[expert]
        y = x @ (matrix if self.is_transposed else matrix.T)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            y = self._linear(self.first, x[token], expert)
            y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
            y = self._linear("down_proj", y, expert) * weight[token, slot, None]
            result = result.index_add(0, token, y)
        return result


def experts_function(
    index: torch.Tensor,
    transposed: bool = False,
    biased: bool = False,
    gated: bool = True,
    device: str = "cpu",
) -> None:
    """``index``: (tokens, top_k) of 6 experts, 6 for one of another rank. fp32 against fp64."""
    kernels.load()
    from moediag.lab.step.kernels import experts

    torch.manual_seed(0)
    module = Experts(6, 24, 20, transposed, biased, gated)
    x, weight = torch.randn(len(index), 24), torch.rand(index.shape)
    found = _ran(
        module.to(device), experts.forward, x.to(device), index.to(device), weight.to(device)
    )
    right = _ran(module.cpu().double(), Experts.forward, x.double(), index, weight.double())
    for name, expected in vars(right).items():
        assert torch.allclose(
            getattr(found, name).cpu().double(), expected, rtol=1e-4, atol=1e-5
        ), name


def _ran(module: Experts, forward: Any, x: torch.Tensor, index: Any, weight: Any) -> Any:
    module.zero_grad()
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = forward(module, x, index, weight)
    y.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(module.parameters()))
    return SimpleNamespace(y=y.detach(), x=x.grad, weight=weight.grad, **gradients)
