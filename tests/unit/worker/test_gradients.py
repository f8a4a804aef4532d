"""Gradients compared with the reference if experts were lost, and inputs of blocks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from moediag.lab.step.measure import gradients as compare
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ModelSpec, Trial, WrapperSpec
from tests.unit.sharded import numbered, placed, rank_of

TRIAL = Trial("t", "s", "v", world_size=2)
EXPERTS, WIDTH = 4, 3


def wrapped(parameter: Any, trial: Trial = TRIAL) -> Wrapped:
    """A model of one parameter called ``w``."""
    model = nn.Module()
    model.w = nn.Parameter(parameter, requires_grad=True)
    return Wrapped(model, Anatomy((), (), EXPERTS), trial)


def judged(made: Wrapped, reference: Any, held: list[int] | None = None) -> Any:
    return compare.compare(made, {"w": reference}, None if held is None else {"w": held})["w"]


# Expert e's gradient has e + 1 everywhere, so that none can be taken for another.
FULL = (torch.arange(EXPERTS, dtype=torch.float32) + 1).view(-1, 1, 1).expand(-1, 2, WIDTH).clone()


def with_gradient(made: Wrapped, gradient: Any) -> Wrapped:
    made.model.w.grad = gradient
    return made


# ------------------------------------------------------------------------ shards


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_shard_is_compared_with_its_own_part(rank: int) -> None:
    with rank_of(rank, 2, 2) as mesh:
        made = wrapped(placed(torch.zeros_like(FULL), mesh, Shard(0), Shard(1)))
        right = placed(FULL, mesh, Shard(0), Shard(1))
        found = judged(with_gradient(made, right), FULL)
        assert (found.wrong, found.max_abs, found.scale) == (False, 0.0, 4.0)
        assert found.placement.startswith("Shard(0) on ")
        other = placed(FULL.flip(0).clone(), mesh, Shard(0), Shard(1))
        assert judged(with_gradient(made, other), FULL).wrong


def test_a_rank_without_elements_is_correct() -> None:
    with rank_of(3, 4) as mesh:
        made = wrapped(placed(torch.zeros(3, 2), mesh, Shard(0)))
        found = judged(
            with_gradient(made, placed(torch.ones(3, 2), mesh, Shard(0))), numbered(3, 2)
        )
        assert (found.wrong, found.max_abs) == (False, 0.0)


def test_a_partial_gradient_is_reduced_first() -> None:
    """The parameter is replicated and its gradient partial; on one rank the part is the whole."""
    with rank_of(0, 1) as mesh:
        from torch.distributed.tensor import DTensor

        made = wrapped(placed(torch.zeros_like(FULL), mesh, Replicate()))
        part = DTensor.from_local(FULL, mesh, [Partial()], run_check=False)
        assert not judged(with_gradient(made, part), FULL).wrong
        assert judged(
            with_gradient(made, DTensor.from_local(FULL * 2, mesh, [Partial()])), FULL
        ).wrong


def test_a_plain_slice_is_selected_by_its_ep_position() -> None:
    made = wrapped(torch.zeros(2, 2, WIDTH))
    made.ep_rank = 1
    assert not judged(with_gradient(made, FULL[2:].clone()), FULL).wrong
    made = wrapped(torch.zeros(2, 2, WIDTH))
    made.ep_rank = 0
    assert judged(with_gradient(made, FULL[2:].clone()), FULL).wrong
    full = numbered(2, 4)
    made = wrapped(torch.zeros(2, 2))
    made.ep_rank = 1
    assert not judged(with_gradient(made, full[:, 2:].clone()), full).wrong, "by columns"


# ------------------------------------------------------------------------ lost rows


@pytest.mark.parametrize("rank", [0, 1])
def test_lost_rows_are_compared_with_their_experts(rank: int) -> None:
    """The whole parameter has two rows instead of four: rank r holds expert 3r."""
    expert = 3 * rank
    with rank_of(rank, 2) as mesh:
        made = wrapped(placed(torch.zeros(2, 2, WIDTH), mesh, Shard(0)))
        gradient = placed(FULL[[0, 3]].clone(), mesh, Shard(0))
        assert not judged(with_gradient(made, gradient), FULL, [expert]).wrong
        found = judged(made, FULL, [1])
        assert found.wrong and found.max_abs == abs(expert - 1)
        # A row of no expert should have no gradient.
        assert judged(made, FULL, [-1]).max_abs == expert + 1
        zero = with_gradient(made, placed(torch.zeros(2, 2, WIDTH), mesh, Shard(0)))
        assert not judged(zero, FULL, [-1]).wrong
        assert not judged(zero, FULL, []).wrong, "nobody knows what the rows are"


@pytest.mark.parametrize("rank", [0, 3])
def test_lost_rows_may_be_sharded_along_another_dimension(rank: int) -> None:
    whole = FULL + numbered(1, 2, WIDTH) * 10
    with rank_of(rank, 2, 2) as mesh:
        made = wrapped(placed(torch.zeros(2, 2, WIDTH), mesh, Shard(0), Shard(1)))
        gradient = placed(whole[[0, 3]].clone(), mesh, Shard(0), Shard(1))
        expert = [0] if rank < 2 else [3]
        assert not judged(with_gradient(made, gradient), whole, expert).wrong
        assert judged(made, whole, [1]).wrong


def test_a_lost_parameter_without_a_gradient_is_missing() -> None:
    with rank_of(0, 2) as mesh:
        made = wrapped(placed(torch.zeros(2, 2, WIDTH), mesh, Shard(0)))
        found = judged(made, FULL, [1])
    assert (found.wrong, found.missing, found.max_abs) == (True, True, 2.0)


# ------------------------------------------------------------------------ multiples


@pytest.mark.parametrize("k", [2.0, 0.5, 0.25, -1.0])
def test_a_multiple_of_the_reference_is_reported_with_its_remainder(k: float) -> None:
    found = judged(with_gradient(wrapped(torch.zeros_like(FULL)), FULL * k), FULL)
    assert found.wrong
    assert found.times.factor == pytest.approx(k)
    assert found.times.residual == pytest.approx(0, abs=1e-6)
    assert found.times.numel == FULL.numel()


def test_another_direction_leaves_a_remainder() -> None:
    other = FULL.flip(0).clone()
    times = judged(with_gradient(wrapped(torch.zeros_like(FULL)), other), FULL).times
    left = other.double() - times.factor * FULL.double()
    assert times.residual == pytest.approx(float(left.norm() / other.double().norm()))
    assert times.residual > 0.3


@pytest.mark.parametrize("gradient", [FULL * float("nan"), FULL * float("inf")])
def test_a_nonfinite_gradient_is_not_a_multiple(gradient: torch.Tensor) -> None:
    assert judged(with_gradient(wrapped(torch.zeros_like(FULL)), gradient), FULL).times is None


def test_a_zero_reference_has_no_multiple_and_a_missing_gradient_is_zero_times() -> None:
    made = with_gradient(wrapped(torch.zeros_like(FULL)), FULL.clone())
    assert judged(made, torch.zeros_like(FULL)).times is None
    assert judged(with_gradient(made, None), FULL).times.factor == 0.0


def trained(optimizer: str, k: float, steps: int = 4) -> tuple[Any, Any, list[float], list[float]]:
    """Two copies of a model that learn the same, the second with ``k`` times its first layer's
    gradients: (the second, what reference.compute tells of the first, losses of both)."""
    torch.manual_seed(0)
    right = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False))
    wrong = copy.deepcopy(right)
    wrong[0].weight.register_hook(lambda gradient: gradient * k)
    expected = {"weights": {n: p.detach().clone() for n, p in right.named_parameters()}}
    losses: tuple[list[float], list[float]] = ([], [])
    for model, told in zip((right, wrong), losses, strict=True):
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        stepping = made(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x = torch.randn(32, 6, generator=generator)
            loss = (model(x) - x[:, :2]).square().mean()
            stepping.zero_grad()
            loss.backward()
            stepping.step()
            told.append(float(loss.detach()))
    expected["moved"] = {n: p.detach().clone() for n, p in right.named_parameters()}
    made = Wrapped(wrong, Anatomy((), (), EXPERTS), TRIAL)
    gradients = {n: p.grad for n, p in right.named_parameters()}
    return made, {**expected, "gradients": gradients}, losses[0], losses[1]


def test_adamw_hides_a_factor_from_losses_and_weights() -> None:
    """Losses alone, and weights after training alone, accept gradients that are twice too large."""
    made, expected, losses, wrong = trained("adamw", 2.0)
    assert wrong == pytest.approx(losses, rel=1e-5)
    moved = compare.updates(made, expected, {})
    assert moved["0.weight"].factor == pytest.approx(1.0, abs=1e-3)
    assert moved["0.weight"].residual < 1e-2
    found = compare.compare(made, expected["gradients"])["0.weight"]
    assert found.wrong
    assert found.times.factor == pytest.approx(2.0, rel=1e-3)


def test_sgd_shows_a_factor_in_the_weights() -> None:
    made, expected, losses, wrong = trained("sgd", 2.0)
    assert compare.updates(made, expected, {})["0.weight"].factor == pytest.approx(2.0, abs=0.05)
    assert wrong[-1] < losses[-1], "it learns faster"
    made, expected, losses, same = trained("sgd", 1.0)
    assert same == losses
    assert compare.updates(made, expected, {})["0.weight"].factor == 1.0


# ------------------------------------------------------------------------ inputs of blocks


KEPT = {"mlp": torch.full((1, 2, 3), 0.5)}


def inputs(kept: Any, reference: Any, **changes: Any) -> dict[str, Any]:
    made = wrapped(torch.zeros(1), dataclasses.replace(TRIAL, **changes))
    return compare.inputs(made, kept, reference)


def test_reference_inputs_are_scaled_to_the_loss_of_one_rank() -> None:
    right = {"mlp": KEPT["mlp"] / 2}
    assert inputs(KEPT, right)["mlp"].wrong is False
    wrong = inputs({"mlp": KEPT["mlp"] * 1.01}, right)["mlp"]
    assert wrong.wrong
    assert wrong.max_abs == pytest.approx(0.005)
    assert inputs({"mlp": KEPT["mlp"] * float("nan")}, right)["mlp"].wrong


def test_without_a_reference_nothing_is_allowed() -> None:
    assert compare.Tolerance.of("float32", [None]).atol == 0
    assert compare.Tolerance.of("float32", [None, torch.full((2,), -4.0)]).atol > 0


def test_a_part_without_elements_has_no_error() -> None:
    none = torch.zeros(0, 3)
    found = compare.Tolerance(0.0, 0.0).judge(none, none, 1.0)
    assert (found.max_abs, found.wrong) == (0.0, False)


def test_inputs_that_cannot_be_compared_are_left_out() -> None:
    right = {"mlp": KEPT["mlp"] / 2}
    assert inputs({}, right) == {}
    assert inputs({"mlp": KEPT["mlp"][:, :1]}, right) == {}
    assert inputs(KEPT, right, wrapper=WrapperSpec(kind="zero3")) == {}
    assert inputs(KEPT, {}) == {}


def test_inputs_are_not_compared_in_bfloat16() -> None:
    far = {"mlp": KEPT["mlp"] * 7}
    assert inputs(far, KEPT)["mlp"].wrong
    assert inputs(far, KEPT, model=ModelSpec(dtype="bfloat16")) == {}


# ---------------------------------------------------------------- mixed precision

MIXED = dataclasses.replace(TRIAL, wrapper=WrapperSpec(param_dtype="bfloat16"))


@pytest.mark.parametrize(("error", "wrong"), [(0.039, False), (0.041, True)])
def test_mixed_precision_is_compared_with_the_effect_of_rounding(error: float, wrong: bool) -> None:
    made = with_gradient(wrapped(FULL, MIXED), FULL + error)
    found = compare.compare(made, {"w": FULL}, rounding={"w": 0.01})["w"]
    assert found.wrong is (error > compare.TIMES_ROUNDING * 2.0**-8 * 4)  # one rounding of a 4
    found = compare.compare(made, {"w": FULL / 100}, rounding={"w": 0.01})["w"]
    assert found.wrong is True
    small = with_gradient(wrapped(FULL / 100, MIXED), FULL / 100 + error)
    assert compare.compare(small, {"w": FULL / 100}, rounding={"w": 0.01})["w"].wrong is wrong


def test_an_expert_without_tokens_has_a_zero_gradient_in_any_dtype() -> None:
    made = with_gradient(wrapped(FULL, MIXED), torch.full_like(FULL, 1e-6))
    found = compare.compare(made, {"w": torch.zeros_like(FULL)}, rounding={"w": 0.0})["w"]
    assert found.wrong is True


def test_inputs_are_not_compared_in_mixed_precision() -> None:
    made = wrapped(FULL, MIXED)
    assert compare.inputs(made, {"b": FULL}, {"b": FULL}) == {}
