"""What the laws do at a point of a step."""

from __future__ import annotations

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
