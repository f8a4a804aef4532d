"""Laws of what an optimizer has and of what feeds it, on recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import LawCheck
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, job


def told(of: Diagnosis, law: str) -> list[str]:
    return [text for text in of.suspicious if f"--allow {law}" in text]


MOVING, STILL = ("0.003", "0.006", "0.01", "0.008"), ("0.01",) * 4


@pytest.mark.parametrize(
    ("rates", "options", "found"),
    [
        ((MOVING, STILL), {}, True),
        ((MOVING, MOVING), {}, False),
        ((STILL, STILL), {}, False),
        ((MOVING, ("0.1",) * 4), {}, False),  # a rate of its own from the beginning
        ((MOVING, ("0.0",) * 4), {}, False),
        ((MOVING, STILL), {"name": "'scale'"}, False),
        ((MOVING, ("None",) * 4), {}, False),
        ((MOVING[:1], STILL[:1]), {}, False),
    ],
)
def test_a_schedule_of_some_groups_only(
    rates: Sequence[Sequence[str]], options: dict[str, str], found: bool
) -> None:
    def change(_: int, one: LawCheck) -> LawCheck:
        at = STEPS.index(one.step)
        hyper = tuple({"lr": own[at], "weight_decay": f"0.{n}"} for n, own in enumerate(rates))
        pieces = tuple(replace(piece, group=1) for piece in one.pieces)
        return replace(one, pieces=pieces, hyper=(hyper[0], {**hyper[1], **options}))

    steps = STEPS[: len(rates[0])]
    texts = told(diagnose(job(2, change, steps=steps)), "learning-rate-zero")
    assert bool(texts) == found
    if found:
        assert "changes in group 0 over the checked steps, and stays 0.01 in group 1" in texts[0]


@pytest.mark.parametrize("group", [{"initial_lr": "0.01"}, {"lr": "0.01"}])
def test_a_scheduler_of_torch_leaves_a_group_alone_on_request(group: dict[str, str]) -> None:
    def change(_: int, one: LawCheck) -> LawCheck:
        at = STEPS.index(one.step)
        hyper = ({**group, "lr": MOVING[at]}, {**group, "lr": STILL[at]})
        pieces = tuple(replace(piece, group=1) for piece in one.pieces)
        return replace(one, pieces=pieces, hyper=hyper)

    assert bool(told(diagnose(job(2, change)), "learning-rate-zero")) == ("lr" in group)
