"""What each detector saw of one step."""

from __future__ import annotations

import math

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers.gradients import gradient_facts
from moediag.diagnosis.numbers.replicas import replica_facts
from moediag.diagnosis.words import trial_tables
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import GradientError, Outcome, Replica, Sketch, StepReplicas

GATE, EXPERT, BLOCK = "layers.0.moe.router.gate.weight", "layers.0.moe.experts.w1", "layers.0.moe"
RIGHT = GradientError(1e-9, 2.0, wrong=False)
WRONG = GradientError(1.0, 2.0, wrong=True)


def evidence(
    wrong: tuple[str, ...] = (), apart: bool = False, program: str = "tp-router", loss: float = 3.0
) -> Evidence:
    def outcome(rank: int) -> Outcome:
        made = {name: WRONG if name in wrong else RIGHT for name in (GATE, EXPERT, BLOCK)}
        value = 1.0 + rank * apart
        gate = Replica(":", gradient=Sketch(value, [value] * 16), has_gradient=True)
        return Outcome(
            rank=rank,
            gradients={"1": {GATE: made[GATE], EXPERT: made[EXPERT]}},
            inputs={"1": {BLOCK: made[BLOCK]}},
            losses=[loss],
            reference_losses=[3.0],
            replicas={"1": StepReplicas(parameters={GATE: gate})},
        )

    ranks = {rank: RankEvidence(rank, outcome=outcome(rank)) for rank in (0, 1)}
    return Evidence(2, ranks, program=program)


def row(found: Evidence) -> tuple[object, ...]:
    table = trial_tables.table(
        trial_tables.seen(found, gradient_facts(found), replica_facts(found))
    )
    assert table is not None
    return table.rows[0]


def test_correct_run_has_an_empty_row() -> None:
    assert row(evidence()) == (0.0, 0.0, 0.0, 0.0, 0.0, "right", "-")


def test_each_detector_sees_only_its_own_failure() -> None:
    assert row(evidence((GATE,)))[2:] == (0.5, 0.0, 0.0, "wrong", "router")
    assert row(evidence((BLOCK,)))[2:] == (0.0, 0.5, 0.0, "wrong", "input")
    assert row(evidence((EXPERT,)))[2:] == (0.0, 0.0, 0.5, "wrong", "others")
    assert row(evidence(apart=True)) == (0.0, 0.5, 0.0, 0.0, 0.0, "wrong", "replicas")
    assert row(evidence(loss=3.3)) == (0.1, 0.0, 0.0, 0.0, 0.0, "wrong", "loss")


def test_detectors_are_listed_in_order() -> None:
    assert row(evidence((BLOCK, GATE), apart=True))[-1] == "replicas, router, input"


def test_error_against_a_zero_reference_is_infinite() -> None:
    found = evidence()
    for seen in found.ranks.values():
        assert seen.outcome is not None
        seen.outcome.gradients["1"][GATE] = GradientError(1.0, 0.0, wrong=True)
    assert row(found)[2] == math.inf


def test_table_exists_only_for_programs_that_compare_inputs() -> None:
    of_model = evidence((GATE,), program="")
    assert trial_tables.seen(of_model, gradient_facts(of_model), replica_facts(of_model)) == ()
    assert [t.title for t in diagnose(of_model).tables] == [
        "Gradients of step 1 against the single-process reference"
    ]
    assert [t.title for t in diagnose(evidence((GATE,))).tables] == [
        "What each detector sees in step 1"
    ]
    assert [t.title for t in diagnose(evidence()).tables] == ["What each detector sees in step 1"]
