"""Optimizer updates compared with a single process, if ranks and gradients agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers.optimizer_update import (
    RATE,
    UPDATES,
    WEIGHTS,
    AppliedFacts,
    applied_facts,
    sentence,
)
from moediag.evidence.model import Evidence
from moediag.protocol import Applied, GradientError, StepReplicas
from moediag.result import Verdict
from tests.unit.evidence_builder import PARAMETERS, fsdp2_job, measured

RIGHT = GradientError(1e-9, 0.03, wrong=False)
MOVED = GradientError(0.013, 0.03, wrong=True)


def left(*of_ranks: Applied, at: str = "1", wrong: int = 0, **outcome: object) -> Evidence:
    """The same on every further step's place: only step ``at`` is given."""
    evidence = measured(fsdp2_job(set(), set()).run(), wrong=PARAMETERS[:wrong])
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        applied = of_ranks[min(rank, len(of_ranks) - 1)]
        changed = replace(seen.outcome, applied={at: applied}, **outcome)
        ranks[rank] = replace(seen, outcome=changed)
    return replace(evidence, ranks=ranks)


def applied(weight: GradientError = RIGHT, rate: float = 1e-3, updates: float = 1.0) -> Applied:
    return Applied({"first.weight": weight, "last.weight": RIGHT}, rate, 1e-3, updates, 1.0)


def test_updates_of_a_single_process_are_clean() -> None:
    assert applied_facts(left(applied())).step is None
    assert applied_facts(left(applied())).compared == 2
    assert diagnose(left(applied())).verdict == Verdict.CLEAN


def test_missing_measurements_are_not_wrong() -> None:
    assert applied_facts(left(Applied(rate=1e-3, updates=4.0))).step is None


def test_moved_weights_are_found() -> None:
    found = diagnose(left(applied(MOVED)))
    assert found.signature == f"wrong-weights:{WEIGHTS}:no-rank"
    assert found.cause == (
        "After step 1 the weights of 1 of 2 parameters are not those of a single process "
        "(first.weight, on ranks 0, 1); largest difference 1.3e-02 in first.weight, which training "
        "should have moved by 3.0e-02 by then."
    )


def test_weights_moved_on_one_rank_make_it_the_culprit() -> None:
    assert diagnose(left(applied(), applied(MOVED))).culprits == (1,)


def test_a_wrong_learning_rate_is_found() -> None:
    found = diagnose(left(applied(rate=9e-4)))
    assert found.signature == f"wrong-weights:{RATE}:no-rank"
    assert found.cause == (
        "After step 1 the learning rate is 0.0009 on ranks 0, 1 and should be 0.001 (single "
        "process)."
    )


def test_an_extra_update_is_found() -> None:
    facts = applied_facts(left(applied(updates=2.0)))
    assert facts == AppliedFacts(1, UPDATES, ranks=(0, 1), actual=2.0, right=1.0)
    assert sentence(facts) == (
        "After step 1 the optimizer's count of updates is 2 on ranks 0, 1 and should be 1 (single "
        "process)."
    )
    # Takes precedence over the rate, which follows from it.
    both = applied_facts(left(applied(), applied(rate=5e-4, updates=2.0)))
    assert both == AppliedFacts(1, UPDATES, ranks=(1,), actual=2.0, right=1.0)


def test_the_largest_difference_of_all_ranks_is_reported() -> None:
    small, large = GradientError(0.25, 0.5, wrong=True), GradientError(0.75, 2.0, wrong=True)
    one = Applied({"a": small, "b": RIGHT, "c": GradientError(9.0, 9.0, wrong=False)})
    other = Applied({"a": RIGHT, "d": large})
    facts = applied_facts(left(one, other, at="3"))
    assert facts == AppliedFacts(
        3, WEIGHTS, ("a", "d"), compared=4, worst="d", error=0.75, moved=2.0, ranks=(0, 1)
    )
    nan = Applied({"d": large, "e": GradientError("nan", 0.5, wrong=True)})
    assert applied_facts(left(nan, one)).worst == "e"
    assert sentence(AppliedFacts(compared=4)) == ""


@pytest.mark.parametrize(("share", "off"), [(0.9e-6, False), (1.2e-6, True)])
def test_learning_rate_tolerance_is_one_millionth(share: float, off: bool) -> None:
    facts = applied_facts(left(applied(rate=1e-3 * (1 + share))))
    assert (facts.what == RATE) is off
    assert applied_facts(left(Applied(rate=5.0, reference_rate=None))).step is None
    assert applied_facts(left(Applied(rate=None, reference_rate=5.0))).step is None


def test_the_first_wrong_step_is_reported() -> None:
    evidence = left(applied())
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        steps = {"10": applied(MOVED), "2": applied(rate=2e-3), "1": applied()}
        ranks[rank] = replace(seen, outcome=replace(seen.outcome, applied=steps))
    facts = applied_facts(replace(evidence, ranks=ranks))
    assert (facts.step, facts.what, facts.actual, facts.right) == (2, RATE, 2e-3, 1e-3)


def test_wrong_gradients_take_precedence_over_weights() -> None:
    assert diagnose(left(applied(MOVED), wrong=1)).verdict == Verdict.WRONG_GRADIENTS


@pytest.mark.parametrize(
    ("step", "signature"),
    [(1, "replica-divergence:optimizer steps:no-rank"), (2, f"wrong-weights:{WEIGHTS}:no-rank")],
)
def test_replicas_take_precedence_over_weights_of_the_same_step_only(
    step: int, signature: str
) -> None:
    """After a wrong update in step 1, replicas that differ in step 2 are its consequence."""
    evidence = left(applied(MOVED))
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        replicas = {str(step): StepReplicas(optimizer_steps=[1.0 + rank] * 2)}
        outcome = replace(seen.outcome, replicas=replicas)
        evidence = replace(evidence, ranks={**evidence.ranks, rank: replace(seen, outcome=outcome)})
    assert diagnose(evidence).signature == signature
