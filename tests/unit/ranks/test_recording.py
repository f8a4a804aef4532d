"""When a step's state is recorded for `moediag resume`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moediag.protocol.recorded_state import SAVED, RecordedStep, StateRequest, read_recorded
from moediag.ranks.resume.recording import StateRecording
from moediag.ranks.verify.ending import Continuing


@contextmanager
def recording(request: StateRequest) -> Iterator[None]:
    found = StateRecording(request, Continuing())
    found.install()
    try:
        yield
    finally:
        found.remove()


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    def plain(self) -> None:
        self.closure()
        self.optimizer.step()

    def without_one(self) -> None:
        self.closure()
        self.optimizer.step(None)  # as accelerate calls it

    def with_closure(self) -> None:
        self.optimizer.step(self.closure)


@pytest.mark.parametrize("make", [Training.plain, Training.without_one, Training.with_closure])
def test_a_step_has_the_state_before_its_update(
    tmp_path: Path, make: Callable[[Training], None]
) -> None:
    training = Training()
    with recording(StateRequest(str(tmp_path), first=1, steps=2)):
        for _ in range(3):
            make(training)
    (found,) = read_recorded(tmp_path).values()
    steps = [RecordedStep.read(tmp_path, 0, step) for step in (1, 2)]
    counts = [set(step.items.get("step count", {})) for step in steps if step is not None]
    assert counts == [set(), {"weight", "bias"}]
    assert (found.done, len(found.batches), len(found.losses[0])) == (True, 2, 1)


@pytest.mark.parametrize("saved", [1, 2])
def test_a_rank_behind_the_one_that_saved_goes_on_to_the_step_after_it(
    tmp_path: Path, saved: int
) -> None:
    training = Training()
    with recording(StateRequest(str(tmp_path))):
        training.plain()
        (tmp_path / f"{SAVED}{saved}").touch()
        training.plain()
        (found,) = read_recorded(tmp_path).values()
    assert found.done is (saved == 1)


def test_a_part_that_is_called_by_itself_is_no_other_model(tmp_path: Path) -> None:
    """As the output layer that a chunked loss calls."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(StateRequest(str(tmp_path), first=1, steps=2)):
        for _ in range(2):
            model[1](model(torch.randn(4, 3))).sum().backward()
            optimizer.step()
    step = RecordedStep.read(tmp_path, 0, 2)
    assert step is not None
    assert set(step.items["buffer"]) == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip


class Container(torch.optim.Optimizer):
    """torchtitan's optimizers: one that has others, and no state of its own."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        super().__init__([p for group in own.param_groups for p in group["params"]], {})
        self.own = own

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.state_dict()}


def test_what_a_container_of_optimizers_saves(tmp_path: Path) -> None:
    training = Training()
    with recording(StateRequest(str(tmp_path), to_end=True)):
        training.plain()
        content = {"model": training.model, "optimizer": Container(training.optimizer)}
        torch.save(content, tmp_path / "whole.pt")
        torch.save({**content, "optimizer": training.optimizer}, tmp_path / "plain.pt")
    (found,) = read_recorded(tmp_path).values()
    whole, plain = (one.values for one in found.saves)
    assert sorted(whole) == sorted(plain) and len(plain) > 4
