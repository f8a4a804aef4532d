"""Laws of what feeds and drives a training loop: samplers, autocast, schedulers and optimizers that
are made anew, on recorded data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import PLAIN, REDUCED, LawCheck, ModelInputs, RankLaws
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, check, job, with_events


def sources(since: int = 0, **odd: Any) -> Diagnosis:
    """Of a job whose model was called with other values on each rank; ``odd`` is so on rank 1."""
    evidence = job(2)
    ranks = {}
    for rank, seen in evidence.ranks.items():
        of = ModelInputs(
            1, 0, f"x{rank}", (0, 1), "DistributedSampler", 2, rank, made="train.py:4 main",
            autocast="cpu, torch.bfloat16", epoch=1, drawn=64, given=64,
        )  # fmt: skip
        inputs = [replace(of, step=s, **(odd if rank and s > since else {})) for s in STEPS]
        laws = replace(seen.laws or RankLaws(), inputs=tuple(inputs))
        ranks[rank] = replace(seen, laws=laws)
    return diagnose(replace(evidence, ranks=ranks))


class TestSources:
    @pytest.mark.parametrize(
        ("odd", "told"),
        [
            ({"seed": 1}, "a different seed on each of these ranks (0 on rank 0, 1 on rank 1)"),
            ({"epoch": 0}, "Call set_epoch on every rank"),
            ({"drawn": 16}, "for a dataset of 16 samples, and its loader has another one of 64"),
            (
                {"autocast": ""},
                "different autocast settings (cpu, torch.bfloat16 on rank 0, off on rank 1)",
            ),
        ],
    )
    def test_what_differs_is_suspicious(self, odd: dict[str, Any], told: str) -> None:
        (text,) = sources(**odd).suspicious
        assert told in text

    @pytest.mark.parametrize(
        "odd",
        [{}, {"replicas": 0, "seed": 7}, {"over": (0, 1, 2), "seed": 7}, {"drawn": 0}],
        ids=["healthy", "without a sampler on rank 1", "of other ranks", "of unknown length"],
    )
    def test_healthy_and_without_evidence(self, odd: dict[str, Any]) -> None:
        of = sources(**odd)
        assert (of.verdict, of.suspicious) == ("clean", ())

    def test_one_step_is_not_enough(self) -> None:
        assert not sources(STEPS[-2], seed=1, autocast="").suspicious


def schedulers(*optimizers: int, kind: str = "LambdaLR", of: int = 2) -> Any:
    """A scheduler for each number of an optimizer, of ``of`` optimizers."""
    return [
        {"step": step, "number": number, "name": kind, "line": "train.py:9 main", "calls": step,
         "updates": step, "optimizer": optimizer, "optimizers": of}
        for step in STEPS
        for number, optimizer in enumerate(optimizers)
    ]  # fmt: skip


class TestSchedulers:
    def test_all_schedulers_of_one_optimizer_are_suspicious(self) -> None:
        (text,) = diagnose(with_events(job(1), scheduled=schedulers(0, 0))).suspicious
        assert "All 2 schedulers of class LambdaLR that step at train.py:9 main" in text

    @pytest.mark.parametrize("events", [schedulers(0, 1), schedulers(0, 0, of=1), schedulers(0)])
    def test_one_for_each_two_for_one_and_one_alone(self, events: Any) -> None:
        assert not diagnose(with_events(job(1), scheduled=events)).suspicious

    @pytest.mark.parametrize("prepared", [True, False])
    def test_accelerate_steps_a_prepared_one_once_for_each_rank(self, prepared: bool) -> None:
        events = tuple({**one, "calls": 2 * one["updates"], "prepared": prepared}
                       for one in schedulers(0))  # fmt: skip
        of = diagnose(with_events(job(2), scheduled=events))
        assert bool(of.suspicious) != prepared
        assert (
            any("accelerate steps a prepared LambdaLR 2 times" in one for one in of.notes)
            == prepared
        )

    @pytest.mark.parametrize(("calls", "told"), [((3, 9, 26), True), ((1, 5, 12), False)])
    def test_the_last_update_of_a_pass_may_have_fewer_micro_batches(
        self, calls: tuple[int, ...], told: bool
    ) -> None:
        """Calls after 1, 3 and 9 updates: a scaler leaves out updates, which is nothing."""
        rows = [
            {**schedulers(0)[0], "step": n, "calls": call, "updates": n}
            for call, n in zip(calls, (1, 3, 9), strict=True)
        ]
        text = diagnose(with_events(job(1), scheduled=rows)).suspicious
        assert any("is called 3 times for each update" in one for one in text) is told


class TestRenewedOptimizers:
    def found(self, *firsts: int, how: str = REDUCED, state: bool = True) -> Diagnosis:
        """An optimizer that is made anew before each of these steps."""

        def own(rank: int) -> RankLaws:
            checks = []
            for step in range(1, 12):
                number = sum(step >= first for first in firsts)
                begun = max(first for first in (1, *firsts) if first <= step)
                one = check(step, (0, 1), how)
                kept = one.state if state and step > begun else {}
                new: LawCheck = replace(one, key=f"a.{number}", count=step - begun, state=kept)
                checks.append(new)
            return RankLaws(tuple(checks))

        evidence = job(2)
        ranks = {r: replace(seen, laws=own(r)) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks))

    def test_an_optimizer_for_each_epoch_is_suspicious(self) -> None:
        (text,) = self.found(4, 8).suspicious
        assert "On ranks 0, 1 the AdamW that steps at train.py:9 main was made anew" in text
        assert "before steps 4, 8" in text

    def test_once_without_state_or_without_a_wrapper(self) -> None:
        assert not self.found(4).suspicious
        assert not self.found(4, 8, state=False).suspicious
        assert not self.found(4, 8, how=PLAIN).suspicious  # clients of federated training
