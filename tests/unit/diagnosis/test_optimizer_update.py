"""What the optimizer left behind against one process: found although ranks and gradients agree."""

from __future__ import annotations

from dataclasses import replace

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers.optimizer_update import RATE, UPDATES, WEIGHTS, applied_facts
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


def test_what_one_process_would_have_left_is_clean() -> None:
    assert applied_facts(left(applied())).step is None
    assert applied_facts(left(applied())).compared == 2
    assert diagnose(left(applied())).verdict == Verdict.CLEAN


def test_what_was_not_measured_is_not_wrong() -> None:
    assert applied_facts(left(Applied(rate=1e-3, updates=4.0))).step is None


def test_weights_that_moved() -> None:
    found = diagnose(left(applied(MOVED)))
    assert found.signature == f"wrong-weights:{WEIGHTS}:no-rank"
    assert found.cause == (
        "After step 1 the weights of 1 of 2 parameters are not those of a single process "
        "(first.weight, on ranks 0, 1); largest difference 1.3e-02 in first.weight, which training "
        "should have moved by 3.0e-02 until then."
    )


def test_weights_that_moved_on_one_rank_only() -> None:
    assert diagnose(left(applied(), applied(MOVED))).culprits == (1,)


def test_a_learning_rate_that_went_on() -> None:
    found = diagnose(left(applied(rate=9e-4)))
    assert found.signature == f"wrong-weights:{RATE}:no-rank"
    assert found.cause == (
        "After step 1 the learning rate is 0.0009 on ranks 0, 1 and should be 0.001 (single "
        "process)."
    )


def test_an_update_too_many() -> None:
    assert applied_facts(left(applied(updates=2.0))).what == UPDATES


def test_a_gradient_that_was_wrong_before_explains_the_weights() -> None:
    assert diagnose(left(applied(MOVED), wrong=1)).verdict == Verdict.WRONG_GRADIENTS


def test_replicas_that_differ_in_that_step_come_first() -> None:
    evidence = left(applied(MOVED))
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        replicas = {"1": StepReplicas(optimizer_steps=[1.0 + rank] * 2)}
        outcome = replace(seen.outcome, replicas=replicas)
        evidence = replace(evidence, ranks={**evidence.ranks, rank: replace(seen, outcome=outcome)})
    found = diagnose(evidence)
    assert found.signature == "replica-divergence:optimizer steps:no-rank"
