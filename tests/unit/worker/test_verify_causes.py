"""Why numbers are wrong: learning rates, updates that are not sent, wrappers that do not reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, RankEvidence
from moediag.pipeline import watch
from moediag.protocol import Applied, GradientError, Measured, MeasuredStep, outcome
from moediag.ranks.verify.model_facts import Reduction
from moediag.ranks.verify.not_reduced import not_sent
from moediag.ranks.verify.otherwise import LearningRates
from moediag.report import terminal
from moediag.report.page import page_of
from moediag.report.text_layout import plain
from moediag.result import Verdict
from tests.unit.measured_runs import RATE, Job, judged, reference
from tests.unit.trial_results import trial_result


@pytest.mark.parametrize(
    ("own", "alone", "merged", "wrong"),
    [
        ([0.1, 0.05], [0.1, 0.05], 1, None),
        ([0.2, 0.1], [0.1, 0.05], 1, None),  # times the number of ranks
        ([0.05], [0.1], 1, None),  # scaled by a rank's batch
        ([0.3], [0.1], 1, 1),
        ([0.1, 0.05], [0.1, 0.1], 1, 2),
        ([0.1, 0.05], [0.1, 0.1], 2, None),  # one process counts other steps
        ([0.2, 0.6], [0.1, 0.1], 1, 2),
    ],
)
def test_a_learning_rate_of_all_ranks(
    own: Sequence[float], alone: Sequence[float], merged: int, wrong: int | None
) -> None:
    steps = [MeasuredStep(rates={"w": rate}) for rate in alone]
    rates = LearningRates(Measured(0, 1, 1, "python", steps=steps, merged=merged))
    found = [rates.step(n, {0: {"w": one}, 1: {"w": one}}) for n, one in enumerate(own, start=1)]
    first = next((n for n, one in enumerate(found, start=1) if any(one.wrong.values())), None)
    assert first == wrong
    assert [one.other for one in found] == [
        {"w"} if one != other else set() for one, other in zip(own, alone, strict=True)
    ]


def test_a_learning_rate_that_nothing_explains_is_a_failure(tmp_path: Path) -> None:
    found = judged(
        Job(tmp_path / "job", rates=dict.fromkeys((0, 1), 3 * RATE)), reference(tmp_path)
    )
    assert found.verdict == Verdict.WRONG_WEIGHTS and found.culprits == ()
    assert "the learning rate is 0.03 on ranks 0, 1 and should be 0.01" in found.cause
    assert "learning rate" in found.next_step


def test_an_update_that_its_owner_does_not_send() -> None:
    right, old = (GradientError(0.1, 1.0, wrong) for wrong in (False, True))
    rates = {0: {"a": 0.1}, 1: {"b": 0.1}}  # what each rank's optimizer updates
    kept = {0: Applied({"a": right, "b": old}), 1: Applied({"a": right, "b": right})}
    assert not_sent(kept, rates) == {0: ["b"]}
    both = {0: Applied({"a": right, "b": old}), 1: Applied({"a": right, "b": old})}
    assert not_sent(both, rates) == {}  # wrong on its owner, too
    assert not_sent({rank: Applied({"a": right}) for rank in (0, 1)}, rates) == {}


class DistributedDataParallel(nn.Module):
    """Stands in for torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._module_parameters = list(module.parameters())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {}),
        ("bare", {outcome.BARE: ["Net"]}),
        ("no_sync", {outcome.NO_SYNC: ["Net"]}),
        ("replaced", {outcome.REPLACED: ["head.weight"]}),
    ],
)
def test_why_a_wrapper_reduces_nothing(fault: str, found: dict[str, list[str]]) -> None:
    model = DistributedDataParallel(Net())
    if fault == "replaced":
        model.module.head.weight = nn.Parameter(model.module.head.weight.detach().clone())  # type: ignore[union-attr]
    step = Reduction()
    for last in (False, True):  # micro-batches
        model.require_backward_grad_sync = last and fault != "no_sync"
        step.forward(model.module if fault == "bare" else model)
    seen = step.found()
    assert {
        how: names for how, names in seen.items() if names in (["Net"], ["head.weight"])
    } == found


@pytest.mark.parametrize(
    ("first", "wrong", "says"),
    [
        (
            [outcome.WrongModule("", what=outcome.AFTER, compared=136, factors=[0.667, 2.0])] * 2,
            4,
            "by the tokens of all micro-batches and ranks",
        ),
        (
            [outcome.WrongModule("", what=outcome.AFTER, compared=136, factors=[1.0])] * 2,
            4,
            "Check the factor of the loss",
        ),
        (
            [outcome.WrongModule("", what=outcome.AFTER, compared=136, factors=[1.0])] * 2,
            1,
            "Check what changes that gradient",
        ),
        (
            [outcome.WrongModule("", what=outcome.AFTER, compared=136, rounded="bfloat16")] * 2,
            4,
            "in float32, not in bfloat16",
        ),
        (
            [outcome.WrongModule("mlp.up", "Linear", "model.py:100", outcome.GRADIENT)] * 2,
            4,
            "Compare what model.py:100 mlp.up computes",
        ),
    ],
)
def test_the_answer_has_eight_lines(
    first: list[outcome.WrongModule], wrong: int, says: str
) -> None:
    errors = {f"layers.{n}.weight": GradientError(0.1, 1.0, n < wrong) for n in range(4)}
    outcomes = {
        rank: outcome.Outcome(rank, gradients={"1": errors}, first_wrong=one, steps_done=1)
        for rank, one in enumerate(first)
    }
    ranks = {r: RankEvidence(r, outcome=o, finished=True) for r, o in outcomes.items()}
    evidence = Evidence(2, ranks, backend="gloo")
    trial = replace(trial_result(), diagnosis=diagnose(evidence), expected="")
    page = page_of(watch.of_job("train.py", [trial]))
    lines = [plain(line) for line in terminal.answer_lines(page.findings[0], 80)]
    assert len(lines) <= 8
    assert says in " ".join(" ".join(lines).split())
