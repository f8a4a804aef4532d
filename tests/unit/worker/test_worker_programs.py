"""The single-process reference of the programs about the training loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moediag.lab.scenario import content
from moediag.protocol import ProgramTask, StepSpec, Trial
from scenarios.programs import matrices, metrics, skipped_step


def trial(name: str, steps: int = 3, **options: Any) -> Trial:
    task = ProgramTask(name, content.program(name).filled(options))
    return Trial("t", "s", "v", world_size=2, step=StepSpec(steps=steps), task=task)


def options_of(made: Trial) -> dict[str, Any]:
    assert isinstance(made.task, ProgramTask)
    return made.task.options


class TestSkippedStep:
    def test_a_step_that_overflows_is_skipped(self) -> None:
        made = trial("skipped-step", overflow="loss", at=2)
        truth = skipped_step.single_process(made, options_of(made))
        assert [g is None for g in truth.gradients] == [False, True, False]
        assert truth.updates == [1.0, 1.0, 2.0]
        assert truth.rates[0] == truth.rates[1] > truth.rates[2]
        for name, weight in truth.weights[0].items():
            assert torch.equal(weight, truth.weights[1][name])
            assert not torch.equal(weight, truth.weights[2][name])

    def test_only_one_row_overflows(self) -> None:
        made = trial("skipped-step", overflow="one-row", at=1)
        model = matrices.Matrices(0)
        skipped_step._backward(model, made, options_of(made), 0, 1, torch.device("cpu"))
        finite = {n: torch.isfinite(p.grad).all(dim=1) for n, p in model.named_parameters()}
        assert finite["first.weight"].tolist() == [True] * (matrices.WIDTH - 1) + [False]
        assert finite["middle.weight"].all() and finite["last.weight"].all()

    def test_every_step_updates_without_an_overflow(self) -> None:
        made = trial("skipped-step", overflow="none")
        assert skipped_step.single_process(made, options_of(made)).updates == [1.0, 2.0, 3.0]


class TestMetrics:
    def test_metrics_differ_in_count_names_and_order_by_rank(self) -> None:
        given = options_of(trial("metrics", fewer=1, keys="one-missing"))
        assert [metrics.micro_batches(given, rank) for rank in range(3)] == [3, 2, 3]
        assert metrics.names(given, 1) == ("loss", "entropy")
        given = options_of(trial("metrics", keys="other-order"))
        assert metrics.names(given, 0) == metrics.NAMES
        assert metrics.names(given, 1) == ("kl", "loss", "entropy")

    def test_a_metric_is_the_mean_over_the_ranks_that_have_it(self) -> None:
        whole, partly = (
            metrics.single_process(made, options_of(made)).metrics[0]
            for made in (trial("metrics"), trial("metrics", keys="one-missing"))
        )
        assert set(whole) == set(partly) == set(metrics.NAMES)
        assert whole["loss"] == partly["loss"]
        assert whole["kl"] != partly["kl"]
        alone = dataclasses.replace(trial("metrics"), world_size=1)
        only = metrics.single_process(alone, options_of(alone)).metrics[0]
        assert only["kl"] == pytest.approx(partly["kl"], rel=1e-6)

    def test_micro_batches_are_weighted_by_their_rank(self) -> None:
        """Rank 0 alone with three, then with two: different gradients, common batches equal."""
        made = dataclasses.replace(trial("metrics", steps=1), world_size=1)
        fewer = dataclasses.replace(trial("metrics", steps=1, micro_batches=2), world_size=1)
        one, other = (metrics.single_process(m, options_of(m)) for m in (made, fewer))
        assert not torch.equal(one.gradients[0]["last.weight"], other.gradients[0]["last.weight"])
