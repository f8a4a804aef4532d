"""What the laws do at a point of a step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch

from moediag.recorder.core import _MAX_FAULTS
from moediag.recorder.laws.context import LawContext


def context_of(recorder: Any, folder: Path) -> LawContext:
    made = LawContext(recorder, str(folder / "more"))
    recorder.on_uninstall.append(made.log.close)
    return made


def test_what_is_for_checked_steps_runs_in_these_only(recorder: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    context, seen = context_of(recorder, tmp_path), list[tuple[str, int]]()
    context.before_step.add("a", lambda *_: seen.append(("always", recorder.current_step)))
    context.before_step.add(
        "a", lambda *_: seen.append(("checked", recorder.current_step)), checked=True
    )
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert [step for what, step in seen if what == "always"] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for what, step in seen if what == "checked"] == [1, 2, 3, 6]
    assert context.updates_of(optimizer) == 7
    assert context.stepped() == [optimizer]


def test_one_that_fails_keeps_the_others_and_is_switched_off(recorder: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    context, seen = context_of(recorder, tmp_path), list[str]()

    def fails() -> None:
        seen.append("fails")
        raise ValueError

    context.after_backward.add("one", fails)
    context.after_backward.add("two", lambda: seen.append("runs"))
    for _ in range(_MAX_FAULTS + 5):
        torch.ones(1, requires_grad=True).sum().backward()
    assert seen.count("fails") == _MAX_FAULTS
    assert seen.count("runs") == _MAX_FAULTS + 5
    recorder.active = False
    torch.ones(1, requires_grad=True).sum().backward()
    recorder.active = True
    assert seen.count("runs") == _MAX_FAULTS + 5


def test_a_model_is_walked_once_in_a_moment(recorder: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    context, seen = context_of(recorder, tmp_path), list[Any]()
    shared = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(shared, torch.nn.Dropout(), shared)
    for _ in range(2):
        context.before_step.add("a", lambda *_: seen.append(context.parts(model)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert [one is seen[0] for one in seen] == [True, True, False, False]
    assert context.parts(model) is not seen[-1] is seen[-2]
    assert seen[0].named_modules == list(model.named_modules())
    assert seen[0].named_parameters == list(model.named_parameters())
    assert [*seen[0].names.values()] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    optimizer.zero_grad()
    assert seen[0].trains({id(shared.bias)})
    assert not seen[0].trains(set())


def test_a_model_can_be_freed_after_a_checked_step(recorder: Any) -> None:
    def train() -> list[Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return list(map(weakref.ref, (model, model[0], optimizer)))

    freed = train()
    gc.collect()
    assert [one() for one in freed] == [None] * 3


def test_few_walks_are_made_in_a_checked_step(recorder: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    walks = 0

    def walk(root: Any, *given: Any, **more: Any) -> Any:
        nonlocal walks
        walks += root is model
        return named_modules(root, *given, **more)

    named_modules = torch.nn.Module.named_modules
    for step in range(3):
        if step == 2:
            torch.nn.Module.named_modules = walk  # type: ignore[method-assign]
        try:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.nn.Module.named_modules = named_modules  # type: ignore[method-assign]
    assert 0 < walks <= 5  # one in each moment; each watcher made its own, 30
