"""Wrong gradients by the part of the model they belong to."""

from __future__ import annotations

import pytest

from moediag.diagnosis.numbers import by_part
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import GradientError, Outcome

EXPERT = "model.layers.0.mlp.experts.down_proj"
GATE = "model.layers.0.mlp.gate.weight"
NORM = "model.norm.weight"
BLOCK = "model.layers.0.mlp"


def evidence(wrong: set[str], step: str = "1", error: object = 0.5) -> Evidence:
    def made(name: str, placement: str = "") -> GradientError:
        bad = name in wrong
        return GradientError(error if bad else 0.0, 1.0, bad, placement=placement)  # type: ignore[arg-type]

    outcomes = [
        Outcome(
            rank=rank,
            gradients={step: {EXPERT: made(EXPERT, "Shard(0) on ep[2]"), GATE: made(GATE),
                              NORM: made(NORM)}},
            inputs={step: {BLOCK: made(BLOCK)}},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    return Evidence(2, {o.rank: RankEvidence(o.rank, outcome=o) for o in outcomes})


@pytest.mark.parametrize(
    ("fqn", "kind"),
    [
        ("model.layers.1.mlp.experts.3.gate_proj.weight", by_part.EXPERTS),
        (EXPERT, by_part.EXPERTS),
        (GATE, by_part.ROUTER),
        ("model.layers.0.block_sparse_moe.gate.weight", by_part.ROUTER),
        ("model.layers.0.mlp.router.bias", by_part.ROUTER),
        ("model.layers.0.mlp.gate_proj.weight", by_part.REST),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", by_part.REST),
        ("model.layers.0.mlp.shared_expert_gate.weight", by_part.REST),
    ],
)
def test_parameters_are_assigned_to_parts(fqn: str, kind: str) -> None:
    assert by_part.kind(fqn) == kind


def test_parts_are_counted_once_over_all_ranks() -> None:
    found = by_part.parts(evidence({GATE, BLOCK}), 1)
    assert [(p.kind, p.wrong, p.compared) for p in found] == [
        (by_part.EXPERTS, 0, 1), (by_part.ROUTER, 1, 1), (by_part.REST, 0, 1),
        (by_part.INPUT, 1, 1),
    ]  # fmt: skip
    assert found[0].placement == "Shard(0) on ep[2]"
    assert found[1].error == 0.5


def test_sentence_names_the_only_wrong_part() -> None:
    router = by_part.sentence(by_part.parts(evidence({GATE}), 1))
    assert router == "The experts' own gradients are right, the router's are not."
    experts = by_part.sentence(by_part.parts(evidence({EXPERT}), 1))
    assert experts == "The experts' gradients are wrong, the router's are right."
    assert by_part.sentence(by_part.parts(evidence({EXPERT, GATE, NORM}), 1)) == ""
    assert by_part.sentence(by_part.parts(evidence(set()), 1)) == ""


def test_a_wrong_block_input_is_found_with_its_step() -> None:
    wrong = evidence({BLOCK}, step="3")
    assert by_part.wrong_inputs(wrong) == 3
    assert "1 of 1 MoE block passes a wrong gradient" in by_part.sentence(by_part.parts(wrong, 3))
    assert by_part.wrong_inputs(evidence({GATE})) is None


def test_a_nan_is_the_largest_error() -> None:
    found = by_part.parts(evidence({GATE}, error="nan"), 1)
    router = next(p for p in found if p.kind == by_part.ROUTER)
    assert router.error != router.error
    assert ("router", "plain", 1, 1, "nan", "1.0e+00") in by_part.table(found, 1).rows
    assert [(part.error, part.scale) for part in found if part is not router] == [(0.0, 1.0)] * 3


def test_the_table_has_a_row_for_each_part() -> None:
    found = by_part.parts(evidence({GATE, BLOCK}, step="7", error=0.25), 7)
    table = by_part.table(found, 7)
    assert table.title == "Gradients of step 7 against the single-process reference"
    assert table.columns == (
        "of", "placement", "wrong", "compared", "largest error", "largest reference",
    )  # fmt: skip
    assert table.rows == (
        ("experts", "Shard(0) on ep[2]", 0, 1, "0", "1.0e+00"),
        ("router", "plain", 1, 1, "2.5e-01", "1.0e+00"),
        (by_part.REST, "plain", 0, 1, "0", "1.0e+00"),
        (by_part.INPUT, "-", 1, 1, "2.5e-01", "1.0e+00"),
    )


def test_the_first_step_with_a_wrong_input_is_reported() -> None:
    outcome = Outcome(
        0,
        inputs={
            "10": {BLOCK: GradientError(1.0, 1.0, wrong=True)},
            "9": {BLOCK: GradientError(0.0, 1.0, wrong=False),
                  "b": GradientError(1.0, 1.0, wrong=True)},
            "2": {BLOCK: GradientError(0.0, 1.0, wrong=False)},
        },
    )  # fmt: skip
    assert by_part.wrong_inputs(Evidence(1, {0: RankEvidence(0, outcome=outcome)})) == 9
    assert by_part.wrong_inputs(Evidence(1, {0: RankEvidence(0)})) is None


def test_sentence_counts_blocks_that_pass_wrong_gradients() -> None:
    inputs = {f"block{n}": GradientError(1.0, 1.0, wrong=n > 0, placement="") for n in range(3)}
    outcome = Outcome(0, inputs={"1": inputs})
    found = by_part.parts(Evidence(1, {0: RankEvidence(0, outcome=outcome)}), 1)
    assert by_part.sentence(found) == (
        "2 of 3 MoE blocks pass a wrong gradient to the layers below."
    )
