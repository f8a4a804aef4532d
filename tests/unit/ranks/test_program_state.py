"""Which objects of a program hold state beside its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moediag.ranks.resume.program_state import Objects
from moediag.ranks.verify.model_pieces import pieces


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer, name: str) -> None:
        vars(self)[name] = inner
        self.param_groups, self.state = inner.param_groups, inner.state


@pytest.mark.parametrize("name", ["optimizer", "_optimizer"])
def test_a_wrapped_optimizer_counts_once_and_has_its_scheduler(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper: Any = Wrapper(inner, name)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    scheduler.optimizer = wrapper
    found = Objects([model], pieces(model), inner)
    assert found.optimizers == [inner]
    assert found.schedulers == [scheduler]
