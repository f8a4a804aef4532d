"""The fix of the auxiliary loss in a Trainer: its weight over ranks and micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable
from scenarios.fixes import aux_loss_by_tokens

AUX, COEFFICIENT = 3.0, 0.5


class Model(nn.Module):
    """Its loss is the auxiliary part alone, as the released models add it."""

    def __init__(self, logits: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=logits)
        self.router_aux_loss_coef = COEFFICIENT

    def forward(self, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        aux = torch.tensor(AUX)
        return SimpleNamespace(loss=COEFFICIENT * aux, aux_loss=aux)


def fixed(model: nn.Module) -> nn.Module:
    aux_loss_by_tokens.before_wrap(model, Anatomy((), (), 8), WrapperSpec())
    return model


def labels(count: int) -> torch.Tensor:
    row = torch.full((1, 9), -100)
    row[0, 1 : 1 + count] = 1
    return row


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [1, 3, 8, 4]])
def test_a_trainers_step_has_the_auxiliary_loss_once(counts: list[int]) -> None:
    """Two ranks with two micro-batches: a Trainer sums micro-batches, multiplies by the number of
    ranks and averages over them."""
    total = sum(counts)
    model, released = fixed(Model()), Model()
    sums = [
        sum(float(m(labels=labels(n), num_items_in_batch=total).loss) * 2 / 2 for n in counts)
        for m in (model, released)
    ]
    assert sums[0] == pytest.approx(COEFFICIENT * AUX)
    assert sums[1] == pytest.approx(4 * COEFFICIENT * AUX), "the released model counts it each time"


def test_without_the_number_of_tokens_the_loss_is_the_released_one() -> None:
    assert float(fixed(Model())(labels=labels(4)).loss) == COEFFICIENT * AUX


def test_a_model_without_the_auxiliary_loss_is_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="adds no auxiliary loss"):
        fixed(Model(logits=False))
