"""What one process generates, with which ranks are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moediag.lab.step.tasks import generation
from moediag.protocol import GenerateTask, StepSpec, Trial
from moediag.recorder.not_applicable import NotApplicable

START = 4  # the first generated token; each further one is the next number


def trial() -> Trial:
    return Trial(
        name="g", scenario="hunt", variant="g", task=GenerateTask(), world_size=2,
        layout={"dp_shard": 2}, step=StepSpec(batch=2, seq_len=4), timeout=60.0,
    )  # fmt: skip


class Model:
    """Generates a series of tokens, each with a lead of ``margin`` over token 0."""

    def __init__(self, margin: float = 1.0, rises: int = 1, generates: bool = True) -> None:
        self.margin = margin
        self.rises = rises
        self.can_generate = lambda: generates
        self.asked = 0

    def eval(self) -> Model:
        return self

    def generate(self, prompt: Any, **options: Any) -> Any:
        self.asked += 1
        margin = self.margin if self.asked > 2 else 1e-4  # those of the first prompts are near
        tokens = [START + self.rises * number for number in range(12)]
        scores = torch.zeros(12, 1, 32)
        scores[:, 0, 0] = 10.0
        for place, token in enumerate(tokens):
            scores[place, 0, token] = 10.0 + margin
        sequences = torch.cat([prompt, torch.tensor([tokens])], 1)
        return SimpleNamespace(sequences=sequences, scores=tuple(scores))


def expected(monkeypatch: pytest.MonkeyPatch, model: Model) -> list[generation.Continued]:
    monkeypatch.setattr(generation.tiny, "build", lambda *_: model)
    return generation._chosen(trial())


def test_ranks_with_other_prompts_end_after_other_numbers_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    found = expected(monkeypatch, model)
    assert [len(one.tokens) for one in found] == list(generation.LENGTHS)
    assert [len(one.logits) for one in found] == list(generation.LENGTHS)
    assert model.asked == 4, "the first prompts have tokens that are nearly as likely"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model(margin=1e-4), "clearly the likeliest"),
        (Model(rises=0), "different numbers of tokens"),
        (Model(generates=False), "does not generate"),
    ],
)
def test_prompts_that_prove_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, model: Model, reason: str
) -> None:
    with pytest.raises(NotApplicable, match=reason):
        expected(monkeypatch, model)


def test_logits_are_compared_over_the_tokens_of_both() -> None:
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert generation._error(right, right) == 0.0
    assert generation._error(right[:1] + 0.4, right) == pytest.approx(0.1)
