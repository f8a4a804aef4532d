"""Mixed precision and fixed routing: reference measurements and rank computations."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from moediag.lab.step import kernels
from moediag.lab.step.measure import reference
from moediag.lab.step.models import skew, tiny
from moediag.lab.step.shard import expert_parallel
from moediag.protocol import ModelSpec, SkewSpec, StepSpec, Trial, WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

ROUTED = SkewSpec(routing="zero-token", batches="identical")


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (2, 2), (3, 2), (5, 3), (64, 8), (4, 1)])
@pytest.mark.parametrize("routing", ["balanced", "zero-token", "one-hot"])
def test_fixed_routing_matches_its_declaration(routing: str, experts: int, top_k: int) -> None:
    tokens = 4 * experts  # whole rounds: equal means equal
    index = skew.routed(routing, tokens, experts, top_k)
    assert index.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in index.tolist())
    counts = torch.bincount(index.reshape(-1), minlength=experts).tolist()
    if routing == "balanced":
        assert set(counts) == {4 * top_k}
    elif routing == "one-hot":
        assert counts == [tokens] * top_k + [0] * (experts - top_k)
    else:
        assert (counts.count(0) > 0) is (experts > top_k)
        assert experts < 2 * top_k or not any(counts[1::2])


def test_tokens_use_experts_of_one_or_both_halves() -> None:
    """Otherwise swapping two ranks' experts would have no effect."""
    for routing in ("balanced", "zero-token"):
        halves = skew.routed(routing, 64, 8, 2) // 4
        across = (halves[:, 0] != halves[:, 1]).float().mean()
        assert 0.2 < float(across) < 0.8


def test_the_model_uses_fixed_routing_and_its_own_scores() -> None:
    spec = ModelSpec()
    model = tiny.build(spec, seed=0)
    anatomy = tiny.anatomy(model, spec)
    bent = skew.RouterSkew(ROUTED, 8)
    seen = []
    for index, expert in enumerate(anatomy.blocks[0].experts):
        expert[1].register_forward_pre_hook(lambda m, a, i=index: seen.append(i))
    with bent.installed(anatomy):
        loss = model(input_ids=torch.arange(32).view(1, 32)).logits.square().mean()
        loss.backward()
    assert set(seen) == {0, 2, 4, 6}
    assert not bent.missed
    gate = anatomy.blocks[0].module.gate.weight.grad
    assert bool(gate.isfinite().all())
    assert bool(gate.any())


def test_the_reference_measures_rounding_if_the_trial_rounds() -> None:
    wrapper = WrapperSpec(param_dtype="bfloat16")
    trial = Trial("t", "s", "v", wrapper=wrapper, skew=ROUTED, step=StepSpec(seq_len=16))
    found = reference.compute(trial)
    plain = reference.compute(Trial("t", "s", "v", skew=ROUTED, step=StepSpec(seq_len=16)))
    assert "rounding" not in plain
    for number, rounding in enumerate(found["rounding"]):
        for fqn, gradient in plain["gradients"][number].items():
            other = found["gradients"][number][fqn]
            assert (gradient is None) == (other is None)
            assert gradient is None or torch.equal(gradient, other)  # fp32 itself is untouched
            if gradient is None:
                assert rounding[fqn] == 0.0  # no rounding without tokens
        relative = [
            rounding[fqn] / float(g.abs().max())
            for fqn, g in found["gradients"][number].items()
            if g is not None and g.any()
        ]
        assert 2**-10 < sorted(relative)[len(relative) // 2] < 0.1


def test_ignored_experts_are_cast_and_restored() -> None:
    module = nn.Linear(4, 4)
    before = module.weight
    expert_parallel.computing_in(torch.bfloat16, module)
    x = torch.randn(3, 4)
    y = module(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert module.weight is before
    y.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    with pytest.raises(RuntimeError):
        module(x)  # fp32 rows on bf16 weights
    assert module.weight is before


def test_without_triton_the_kernel_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotApplicable, match=r"`--stack triton=3.6.0` adds it"):
        kernels.register()


def test_a_release_without_the_registry_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The development environment's transformers 4.53 has none."""
    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setitem(sys.modules, "moediag.lab.step.kernels.experts", ModuleType("experts"))
    with pytest.raises(NotApplicable, match="no registry of experts functions"):
        kernels.register()


def test_ranks_on_the_cpu_use_the_interpreter_before_triton_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kernels.ENV_INTERPRET, raising=False)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    kernels.interpret()
    assert kernels.ENV_INTERPRET not in os.environ
    monkeypatch.delitem(sys.modules, "triton")
    kernels.interpret()
    assert os.environ[kernels.ENV_INTERPRET] == "1"
