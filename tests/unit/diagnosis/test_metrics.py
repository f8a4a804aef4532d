"""Reduced metrics: equal on all ranks and right, swapped, or equal and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers import metrics
from moediag.diagnosis.numbers.metrics import ALIKE, DIFFER, metric_facts
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from tests.unit.evidence_builder import PARAMETERS, fsdp2_job, measured

TRUE = {"loss": 1.25, "kl": 0.5, "entropy": 2.0}


def reporting(
    *of_ranks: Mapping[str, float], truth: Mapping[str, float] | None = TRUE, wrong: int = 0
) -> Evidence:
    evidence = measured(fsdp2_job(*[set()] * len(of_ranks)).run(), wrong=PARAMETERS[:wrong])
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        outcome = replace(
            seen.outcome,
            metrics={"1": dict(of_ranks[rank])},
            reference_metrics={"1": dict(truth)} if truth else {},
        )
        ranks[rank] = replace(seen, outcome=outcome)
    return replace(evidence, ranks=ranks)


def test_correct_metrics_are_clean() -> None:
    near = {name: value * (1 + 1e-6) for name, value in TRUE.items()}
    evidence = reporting(TRUE, near)
    assert metric_facts(evidence) == metrics.MetricFacts(compared=3)
    assert diagnose(evidence).verdict == Verdict.CLEAN


def test_a_metric_missing_on_one_rank_is_not_wrong() -> None:
    assert metric_facts(reporting(TRUE, {"loss": 1.25})).step is None


def test_swapped_metrics_are_found() -> None:
    found = diagnose(reporting({**TRUE, "loss": 0.7, "kl": 1.1}, {**TRUE, "loss": 1.1, "kl": 0.7}))
    assert (found.verdict, found.confidence) == (Verdict.WRONG_METRICS, Confidence.HIGH)
    assert found.signature == f"wrong-metrics:{DIFFER}:no-rank"
    assert found.cause == (
        "In step 1 reduced metrics differ between ranks: `loss` rank 0 0.7, rank 1 1.1 (single "
        "process 1.25); `kl` rank 0 1.1, rank 1 0.7 (single process 0.5). What rank 0 calls `loss` "
        "is what rank 1 calls `kl`. All compared gradients match the single process."
    )
    (table,) = found.tables
    assert table.title == "Metrics as each rank reports them, and in a single process"
    assert table.columns == ("step", "metric", "rank", "reported", "single process")
    assert table.rows == (
        (1, "loss", 0, 0.7, 1.25), (1, "loss", 1, 1.1, 1.25),
        (1, "kl", 0, 1.1, 0.5), (1, "kl", 1, 0.7, 0.5),
        (1, "entropy", 0, 2.0, 2.0), (1, "entropy", 1, 2.0, 2.0),
    )  # fmt: skip


def test_nothing_is_said_about_gradients_that_were_not_compared() -> None:
    evidence = reporting({"kl": 0.25}, {"kl": 0.25})
    ranks = {
        rank: replace(seen, outcome=seen.outcome and replace(seen.outcome, gradients={}))
        for rank, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks))
    assert (found.verdict, "gradients" in (found.cause or "")) == (Verdict.WRONG_METRICS, False)


def test_the_first_step_lists_all_wrong_metrics() -> None:
    evidence = reporting(TRUE, TRUE)
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        steps = {"10": {"kl": 9.0}, "2": {"kl": 0.75, "loss": 1.0}, "1": dict(TRUE)}
        truth = {"1": dict(TRUE), "2": {"kl": 0.5, "loss": 1.0}, "10": {"kl": 0.5}}
        outcome = replace(seen.outcome, metrics=steps, reference_metrics=truth)
        ranks[rank] = replace(seen, outcome=outcome)
    facts = metric_facts(replace(evidence, ranks=ranks))
    assert (facts.step, facts.pattern, facts.compared) == (2, ALIKE, 2)
    assert facts.wrong == {"kl": {0: 0.75, 1: 0.75}}
    assert facts.right == {"kl": 0.5, "loss": 1.0}
    assert facts.swapped == ()
    assert metrics.sentence(facts) == (
        "In step 2 metrics are wrong: `kl` 0.75 on every rank (single process 0.5)."
    )


@pytest.mark.parametrize(("ranks", "more"), [(4, ""), (5, " and 1 more"), (7, " and 3 more")])
def test_at_most_four_ranks_are_listed(ranks: int, more: str) -> None:
    facts = metric_facts(reporting(*({"kl": float(n)} for n in range(ranks)), truth=None))
    assert metrics.sentence(facts) == (
        "In step 1 reduced metrics differ between ranks: `kl` rank 0 0, rank 1 1, rank 2 2, rank 3 "
        f"3{more}."
    )
    assert metrics.sentence(metrics.MetricFacts(compared=3)) == ""


@pytest.mark.parametrize(("share", "wrong"), [(0.9e-4, False), (1.2e-4, True)])
def test_rounding_differences_are_ignored(share: float, wrong: bool) -> None:
    for value in (1.25, -1.25):
        one = {"kl": value * (1 + share)}
        facts = metric_facts(reporting(one, {"kl": value}, truth={"kl": value}))
        assert (facts.step is not None) is wrong


def test_metrics_that_differ_between_ranks_are_wrong_without_a_reference() -> None:
    facts = metric_facts(reporting({"loss": 1.0}, {"loss": 1.5}, truth=None))
    assert (facts.pattern, facts.wrong) == (DIFFER, {"loss": {0: 1.0, 1: 1.5}})
    assert metric_facts(reporting({"loss": 1.0}, {"loss": 1.0}, truth=None)).step is None


def test_a_wrong_metric_on_every_rank_needs_the_reference() -> None:
    """Comparing only ranks accepts a zero added for a missing metric."""
    halved = {**TRUE, "kl": 0.25}
    assert diagnose(reporting(halved, halved, truth=None)).verdict == Verdict.CLEAN
    found = diagnose(reporting(halved, halved))
    assert found.signature == f"wrong-metrics:{ALIKE}:no-rank"
    assert "`kl` 0.25 on every rank (single process 0.5)" in found.cause


def test_wrong_gradients_take_precedence() -> None:
    found = diagnose(reporting({**TRUE, "kl": 3.0}, TRUE, wrong=1))
    assert found.verdict == Verdict.WRONG_GRADIENTS


@pytest.mark.parametrize(("values", "differ"), [
    ([float("nan")] * 2, False), ([float("nan"), 1.0], True), ([float("inf"), 1.0], True),
    ([float("inf")] * 2, False), ([float("inf"), float("-inf")], True), ([0.0, 0.0], False),
])  # fmt: skip
def test_nan_equals_only_nan(values: list[float], differ: bool) -> None:
    evidence = reporting(*({"kl": value} for value in values), truth=None)
    assert (metric_facts(evidence).step is not None) is differ
