"""Laws of what feeds and drives a training loop: samplers, autocast, schedulers and optimizers that
are made anew, on recorded data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import PLAIN, REDUCED, LawCheck, RankLaws
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, check, job, with_events


def sources(rank: int, **odd: Any) -> Any:
    """What each rank's model was called with; ``odd`` is so on rank 1."""
    of = {
        "over": [0, 1], "autocast": "cpu, torch.bfloat16", "sampler": "DistributedSampler",
        "line": "train.py:4 main", "replicas": 2, "number": rank, "seed": 0, "epoch": 1,
        "drawn": 64, "given": 64,
    }  # fmt: skip
    return [{**of, **(odd if rank else {}), "step": step} for step in STEPS]


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
        (text,) = diagnose(with_events(job(2), source=lambda rank: sources(rank, **odd))).suspicious
        assert told in text

    @pytest.mark.parametrize(
        "odd",
        [{}, {"sampler": "", "seed": 7}, {"over": [0, 1, 2], "seed": 7}, {"drawn": 0}],
        ids=["healthy", "without a sampler on rank 1", "of other ranks", "of unknown length"],
    )
    def test_healthy_and_without_evidence(self, odd: dict[str, Any]) -> None:
        of = diagnose(with_events(job(2), source=lambda rank: sources(rank, **odd)))
        assert (of.verdict, of.suspicious) == ("clean", ())

    def test_one_step_is_not_enough(self) -> None:
        late = lambda rank: [*sources(rank)[:3], *sources(rank, seed=1, autocast="")[3:]]  # noqa: E731
        assert not diagnose(with_events(job(2), source=late)).suspicious


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
