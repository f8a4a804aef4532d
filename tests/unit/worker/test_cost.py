"""The timing of fixes on one rank: order, data and the outcome on disk. No times are compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.judgement import step_time as control
from moediag.lab.step import data, preparation, training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import gradients, reference
from moediag.lab.step.models import tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.lab.step.tasks import cost
from moediag.protocol import (
    CostTask,
    ModelSpec,
    Outcome,
    SkewSpec,
    Starve,
    StepSpec,
    StepTask,
    Trial,
)
from moediag.recorder.not_applicable import NotApplicable

TINY = ModelSpec(layers=1, experts=4, vocab=64)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Uses unsharded models instead of FSDP2; records each timed step in order."""
    seen: list[tuple[str, Any]] = []
    real = training.forward_backward

    def prepare(trial: Trial, device: Any) -> Wrapped:
        if trial.fix == "zero-fill":
            raise NotApplicable("zero-fill acts on FSDP2")
        model = tiny.build(trial.model, trial.step.seed)
        wrapped = Wrapped(model, tiny.anatomy(model, trial.model), trial)
        wrapped.make_optimizer()
        return wrapped

    def forward_backward(wrapped: Wrapped, rank: int, number: int, device: Any) -> float:
        seen.append((wrapped.trial.fix or "", wrapped.trial))
        return real(wrapped, rank, number, device)

    monkeypatch.setattr(cost, "synchronize", lambda: None)  # there are no other ranks
    monkeypatch.setattr(preparation, "prepare", prepare)
    monkeypatch.setattr(training, "forward_backward", forward_backward)
    return seen


def trial(*fixes: str, rounds: int = 3) -> Trial:
    return Trial(
        "cost", "s", "cost", world_size=1, layout={"dp_shard": 1},
        step=StepSpec(steps=4, accumulate=2, seq_len=8),
        skew=SkewSpec(starve=[Starve(expert=3)]),
        task=CostTask(fixes=list(fixes), rounds=rounds, model=TINY, batch=2, seq_len=16),
    )  # fmt: skip


def outcome_of(asked: Trial) -> Outcome:
    collector = Collector(asked, 0, CPU)
    cost.run(collector)
    return collector.outcome()


def test_every_fix_and_the_unfixed_step_twice_are_timed_each_round(
    ran: list[tuple[str, Any]],
) -> None:
    outcome = outcome_of(trial("touch", "iterate-all"))
    assert set(outcome.cost) == {"", "again", "touch", "iterate-all"}
    assert {len(seconds) for seconds in outcome.cost.values()} == {3}
    assert all(second > 0 for seconds in outcome.cost.values() for second in seconds)
    # Round 0 is run but not counted.
    assert [fix for fix, _ in ran].count("touch") == 4
    assert [fix for fix, _ in ran].count("") == 8
    # Each round starts with a different one.
    firsts = [ran[i][0] for i in range(0, len(ran), 4)]
    assert len(set(firsts)) == 3
    assert set(control.ratios(outcome.cost)) == {"", "touch", "iterate-all"}


def test_the_timed_step_is_healthy_and_has_the_requested_size(
    ran: list[tuple[str, Any]],
) -> None:
    outcome_of(trial("touch", rounds=1))
    for _, timed in ran:
        assert timed.skew == SkewSpec(batches="identical")
        assert (timed.model, timed.step.batch, timed.step.seq_len) == (TINY, 2, 16)
        assert timed.step.accumulate == 1
        assert timed.reference_path is None


def test_a_fix_that_cannot_be_applied_is_noted_and_skipped(
    ran: list[tuple[str, Any]],
) -> None:
    outcome = outcome_of(trial("zero-fill", "touch", rounds=2))
    assert set(outcome.cost) == {"", "again", "touch"}
    assert outcome.notes == ["cost of zero-fill: zero-fill acts on FSDP2"]


def test_cost_outcome_round_trips_through_its_file(
    ran: list[tuple[str, Any]], tmp_path: Path
) -> None:
    outcome = outcome_of(trial("touch", rounds=2))
    path = outcome.write(tmp_path)
    assert Outcome.read(path) == outcome


def test_a_step_equals_its_reference_and_another_batch_does_not(tmp_path: Path) -> None:
    """The whole step in one process: losses, gradients of every step, norms."""
    path = str(tmp_path / "reference.pt")
    subject = dataclasses.replace(
        trial(), task=StepTask(), model=TINY, skew=SkewSpec(), reference_path=path
    )
    reference.run(subject)
    expected = reference.load(path)
    assert len(expected["gradients"]) == len(expected["losses"]) == subject.step.steps
    for skew, right in ((SkewSpec(), True), (SkewSpec(batches="one-token"), False)):
        model = tiny.build(TINY, 0)
        wrapped = Wrapped(model, tiny.anatomy(model, TINY), subject)
        wrapped.make_optimizer()
        for number in range(1, subject.step.steps + 1):
            total = 0.0
            for micro in range(subject.step.accumulate):
                tokens = data.batch(dataclasses.replace(subject, skew=skew), 0, number, micro)
                loss = wrapped.loss(tokens) / subject.step.accumulate
                wrapped.backward(loss)
                total += float(loss.detach())
            errors = gradients.compare(wrapped, expected["gradients"][number - 1])
            assert any(e.wrong for e in errors.values()) is not right
            norm = training.finish(wrapped)
            close = norm == pytest.approx(expected["norms"][number - 1], rel=1e-4)
            assert close is right
            assert (total == pytest.approx(expected["losses"][number - 1], rel=1e-5)) is right
