"""The hooks of a step see every way to clip and to step, and leave torch as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from moediag.recorder.step.hooks import StepHooks


@pytest.fixture
def hooks() -> Iterator[StepHooks]:
    found = StepHooks()
    yield found
    found.remove()


def with_gradient() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def clip(how: str, model: nn.Module) -> None:
    if how == "clip_grad_norm_":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif how == "one tensor":
        nn.utils.clip_grad_norm_(next(model.parameters()), 0.5)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=0.5, total_norm=norm)


@pytest.mark.parametrize("how", ["clip_grad_norm_", "one tensor", "clip_grads_with_norm_"])
def test_every_function_that_clips_is_seen_once_before_it_scales(
    hooks: StepHooks, how: str
) -> None:
    seen: list[tuple[list[Any], float, float, float, str]] = []

    def act(parameters: list[Any], limit: Any, norm: Any, frame: Any) -> None:
        now = float(parameters[0].grad.abs().max())
        while frame.f_code.co_filename != __file__:
            frame = frame.f_back
        seen.append((parameters, float(limit), float(norm), now, frame.f_code.co_name))

    assert hooks.before_clipping(act)
    model = with_gradient()
    clip(how, model)
    ((parameters, limit, norm, before, caller),) = seen
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()][: len(parameters)]
    assert (limit, caller) == (0.5, "clip")
    grown = float(parameters[0].grad.abs().max())
    assert grown == pytest.approx(before * limit / norm, rel=1e-4)


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_is_seen_before_and_after_with_its_closure(hooks: StepHooks, closure: bool) -> None:
    seen: list[object] = []
    hooks.before_step(lambda optimizer, given, _: seen.append((optimizer, given)))
    hooks.before_step(lambda *_: seen.append("second"))
    hooks.after_step(seen.append)
    optimizer = torch.optim.SGD(with_gradient().parameters(), lr=0.1)
    optimizer.step(*([lambda: 0.0] if closure else []))
    assert seen == [(optimizer, closure), "second", optimizer]


def test_an_outermost_forward_is_seen_with_what_its_modules_return(hooks: StepHooks) -> None:
    model, other = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Linear(3, 2)
    seen: list[Any] = []
    inside: list[torch.Tensor] = []

    def before(module: Any, args: Any, kwargs: Any) -> str:
        seen.append((module, len(args), kwargs))
        return "value"

    hooks.around_forward(
        lambda module: module is not other,
        before,
        lambda *given: seen.append(given),
        lambda *given: inside.append(given[3]),
    )
    other(torch.ones(1, 3))
    result = model(input=torch.ones(1, 3))
    assert [one[0] for one in seen] == [model, "value"]
    assert seen[0][1:] == (0, {"input": seen[0][2]["input"]})
    assert seen[1][1] is result
    assert len(inside) == 2
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    model(torch.ones(1, 3))
    assert len(seen) == 5  # a forward that raised is over


def test_a_backward_is_seen_before_gradients_are_there(hooks: StepHooks) -> None:
    model = nn.Linear(3, 2)
    seen: list[tuple[float, object]] = []
    hooks.before_backward(lambda loss: seen.append((float(loss.detach()), model.weight.grad)))
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    assert seen == [(float(loss.detach()), None)]
    assert model.weight.grad is not None


def test_removed_hooks_leave_nothing_in_torch() -> None:
    places: list[tuple[Any, str]] = [
        (clip_grad, "_clip_grads_with_norm_"),
        (nn.utils, "clip_grads_with_norm_"),
        (nn.Module, "__call__"),
        (torch.Tensor, "backward"),
    ]
    originals = [vars(owner)[name] for owner, name in places]
    found, seen = StepHooks(), list[object]()
    found.around_forward(lambda _: True, lambda *_: None, lambda *_: None, lambda *_: None)
    found.before_backward(seen.append)
    found.before_clipping(lambda *given: seen.append(given))
    found.before_step(lambda *given: seen.append(given))
    found.after_step(seen.append)
    changed = [vars(owner)[name] for owner, name in places]
    assert not any(one is other for one, other in zip(changed, originals, strict=True))
    found.remove()
    restored = [vars(owner)[name] for owner, name in places]
    assert all(one is other for one, other in zip(restored, originals, strict=True))
    model = with_gradient()
    clip("clip_grads_with_norm_", model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not seen
