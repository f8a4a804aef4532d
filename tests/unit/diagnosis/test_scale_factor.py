"""A gradient that is k times the reference is told as that, with the mesh axis of that size; any
other error is not, however near it is to a multiple in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers import scale_factor
from moediag.diagnosis.numbers.by_part import EXPERTS, INPUT, REST, ROUTER
from moediag.diagnosis.numbers.scale_factor import WORLD, Size, factor_facts, sentences, size_of
from moediag.evidence.model import Evidence
from moediag.protocol import GradientError, Multiple, StepReplicas
from moediag.result import Verdict
from tests.unit.evidence_builder import fsdp2_job, measured

UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
GATE, NORM = "model.layers.0.mlp.gate.weight", "model.norm.weight"
NAMES = {UP: EXPERTS, DOWN: EXPERTS, GATE: ROUTER, NORM: REST}
MESH = {"dp_shard": 4, "ep": 2}
ON_DP_SHARD = "Shard(0) on dp_shard[4]"


def error(k: float, residual: float = 1e-7, numel: int = 64, placement: str = "") -> GradientError:
    """Of a gradient whose largest value should be 1."""
    wrong = abs(k - 1) > 1e-3 or residual > 1e-3
    off = max(abs(k - 1), residual)
    return GradientError(off, 1.0, wrong, False, placement, Multiple(k, residual, numel))


def job(
    *by_rank: Mapping[str, GradientError],
    layout: Mapping[str, int] = MESH,
    moved: float | None = None,
) -> Evidence:
    """Ranks with correct gradients except those given."""
    evidence = replace(measured(fsdp2_job(*[set() for _ in by_rank]).run()), layout=layout)
    ranks = {}
    for rank, given in enumerate(by_rank):
        seen = evidence.ranks[rank]
        assert seen.outcome is not None
        gradients = {"1": {name: given.get(name, error(1.0)) for name in NAMES}}
        updates = {} if moved is None else {"4": {n: Multiple(moved, 1e-4, 64) for n in NAMES}}
        changed = replace(
            seen.outcome,
            gradients=gradients,
            updates=updates,
            losses=[4.85],
            reference_losses=[4.85],
        )
        ranks[rank] = replace(seen, outcome=changed)
    return replace(evidence, ranks=ranks)


def all_ranks(k: float, *names: str, world: int = 4, **more: object) -> Evidence:
    wrong = {name: error(k, placement=ON_DP_SHARD) for name in names}
    return job(*[wrong] * world, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ found


@pytest.mark.parametrize(
    ("k", "size"),
    [
        (2.0, Size(2, "ep")),
        (0.5, Size(2, "ep", inverse=True)),
        (4.0, Size(4, "dp_shard")),
        (8.0, Size(8, WORLD)),
        (0.125, Size(8, WORLD, inverse=True)),
        (3.0, None),
        (0.7, None),
        (-1.0, None),
    ],
)
def test_each_factor_is_reported_with_the_axis_of_its_size(k: float, size: Size | None) -> None:
    facts = factor_facts(all_ranks(k, UP, DOWN), 1)
    (found,) = facts.found
    assert facts.complete
    assert (found.kind, found.size) == (EXPERTS, size)
    assert found.factor == pytest.approx(k)


def test_cause_contains_the_factor_and_signature_does_not() -> None:
    found = diagnose(all_ranks(2.0, UP, DOWN))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert found.signature == "wrong-gradients:constant-factor:no-rank"
    assert (
        "The gradients of the experts are 2.000 times the reference on every rank (to 1.0e-07); 2 "
        "is the size of ep: they are summed over ep and never divided by it." in found.cause
    )
    assert "hides" not in found.cause, "nobody looked at the weights"


def test_a_factor_below_one_is_a_repeated_division() -> None:
    found = diagnose(all_ranks(0.125, UP, DOWN, GATE, NORM))
    assert (
        "The gradients of the experts, the router and all other parameters are 0.125 times the "
        "reference on every rank (to 1.0e-07); 8 is the number of ranks: they are divided by it "
        "once too many times." in found.cause
    )


def test_parts_with_different_factors_are_separate() -> None:
    evidence = job(*[{UP: error(2.0), DOWN: error(2.0), NORM: error(0.5)}] * 4)
    facts = factor_facts(evidence, 1)
    assert [(f.kind, round(f.factor, 3)) for f in facts.found] == [(EXPERTS, 2.0), (REST, 0.5)]
    assert facts.complete
    text = sentences(facts)
    assert text.index("the experts are 2.000") < text.index("all other parameters are 0.500")


def test_a_factor_of_a_few_parameters_is_not_that_of_their_part() -> None:
    assert "The gradients of 1 of 2 parameters of the experts are 2.000 times" in sentences(
        factor_facts(all_ranks(2.0, UP), 1)
    )
    assert "The gradients of the experts are 2.000 times" in sentences(
        factor_facts(all_ranks(2.0, UP, DOWN), 1)
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [(tuple(NAMES), "the number of micro-batches"), ((UP, DOWN), "the size of ep")],
)
def test_micro_batches_are_a_factor_of_all_parameters(names: tuple[str, ...], words: str) -> None:
    """Two micro-batches and two ranks on ep: what the loss is multiplied by reaches everything."""
    evidence = all_ranks(2.0, *names)
    ranks = {
        rank: replace(seen, outcome=replace(seen.outcome, micro_batches=2))  # type: ignore[type-var]
        for rank, seen in evidence.ranks.items()
    }
    text = sentences(factor_facts(replace(evidence, ranks=ranks), 1))
    assert words in text
    assert ("micro-batches" in text) == ("micro-batches" in words)


def test_block_inputs_are_a_part() -> None:
    evidence = job(*[{}] * 4)
    ranks = {
        rank: replace(
            seen, outcome=replace(seen.outcome, inputs={"1": {"model.layers.0.mlp": error(0.5)}})
        )
        for rank, seen in evidence.ranks.items()
    }
    (found,) = factor_facts(replace(evidence, ranks=ranks), 1).found
    assert (found.kind, found.size) == (INPUT, Size(2, "ep", inverse=True))


def test_small_and_large_tensors_have_equal_weight() -> None:
    small = {UP: error(2.0), DOWN: error(2.0, 0.0, numel=1)}
    assert factor_facts(job(*[small] * 4), 1).complete


def test_bf16_has_a_larger_tolerance() -> None:
    wrong = {UP: error(2.0, 0.02), DOWN: error(2.03, 0.02)}
    evidence = job(*[wrong] * 4)
    assert factor_facts(evidence, 1).found == ()
    ranks = {
        rank: replace(
            seen, outcome=replace(seen.outcome, replicas={"1": StepReplicas(dtype="bfloat16")})
        )
        for rank, seen in evidence.ranks.items()
    }
    assert factor_facts(replace(evidence, ranks=ranks), 1).complete


# ------------------------------------------------------------------------ not found


UNLIKE: dict[str, list[dict[str, GradientError]]] = {
    "an error in another direction": [{UP: error(2.0, 0.3), DOWN: error(2.0, 0.3)}] * 2,
    "another factor on each rank": [{UP: error(2.0)}, {UP: error(3.0)}],
    "another factor in each tensor": [{UP: error(2.0), DOWN: error(4.0)}] * 2,
    "zeros": [{UP: error(0.0, 0.0)}] * 2,
    "one number alone": [{UP: error(2.0, 0.0, numel=1)}] * 2,
    "a reference of zeros": [{UP: GradientError(1.0, 0.0, True)}] * 2,
}


@pytest.mark.parametrize("by_rank", UNLIKE.values(), ids=UNLIKE)
def test_other_errors_are_not_a_factor(by_rank: list[dict[str, GradientError]]) -> None:
    evidence = job(*by_rank)
    facts = factor_facts(evidence, 1)
    assert (facts.found, facts.complete, sentences(facts)) == ((), False, "")
    found = diagnose(evidence)
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert "constant-factor" not in found.signature


def test_correct_gradients_have_no_factor() -> None:
    facts = factor_facts(job({}, {}), None)
    assert (facts.found, facts.complete, facts.table) == ((), False, None)
    assert diagnose(job({}, {})).verdict == Verdict.CLEAN


def test_a_factor_beside_another_error_does_not_explain_it() -> None:
    """The factor is in the cause but not in the signature."""
    found = diagnose(job(*[{UP: error(2.0), DOWN: error(2.0), NORM: error(1.3, 0.4)}] * 2))
    assert "the experts are 2.000 times" in found.cause
    assert found.signature == "wrong-gradients:no divergence seen:no-rank"


# ------------------------------------------------------------------------ which axis


@pytest.mark.parametrize(
    ("kind", "layout", "placement", "axes", "same"),
    [
        (EXPERTS, {"dp_shard": 2, "ep": 2}, "", "ep", ("dp_shard",)),
        (REST, {"dp_shard": 2, "ep": 2}, "", "dp_shard", ("ep",)),
        # FSDP divides by the axis it reduces over, so it is the other one.
        (REST, {"dp_shard": 2, "ep": 2}, "Shard(0) on dp_shard[2]", "ep", ("dp_shard",)),
        (EXPERTS, {"dp_shard": 2, "tp": 2}, "Shard(0) on dp_shard[2]", "tp", ("dp_shard",)),
        (REST, {"dp_shard": 2}, "", WORLD, ()),
    ],
)
def test_axes_of_equal_size_are_distinguished_by_placement(
    kind: str, layout: dict[str, int], placement: str, axes: str, same: tuple[str, ...]
) -> None:
    assert size_of(2.0, kind, layout, placement) == Size(2, axes, same=same)


def test_one_axis_is_preferred_to_a_product() -> None:
    layout = {"dp_replicate": 2, "dp_shard": 2, "ep": 4}
    assert size_of(4.0, REST, layout, "") == Size(4, "ep")
    assert size_of(8.0, REST, layout, "") == Size(8, "dp_replicate x ep", same=("dp_shard x ep",))


def test_an_unknown_mesh_uses_the_number_of_ranks() -> None:
    (found,) = factor_facts(all_ranks(2.0, UP, world=2, layout={}), 1).found
    assert found.size == Size(2, WORLD)
    facts = factor_facts(all_ranks(2.0, UP, world=4, layout={}), 1)
    assert facts.found[0].size is None
    assert "the axes of the mesh are not known" in sentences(facts)


# ------------------------------------------------------------------------ weights and the table


def test_cause_says_that_the_weights_hide_the_factor() -> None:
    """Comparing weights or the loss would accept it."""
    evidence = all_ranks(2.0, UP, DOWN, moved=1.0005)
    found = diagnose(evidence)
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert (
        "After 4 steps their weights have moved 1.000 times as far as the reference's: the "
        "optimizer hides a constant factor, so the loss curve does not show it." in found.cause
    )
    assert "hides" not in diagnose(all_ranks(2.0, UP, DOWN, moved=1.98)).cause


def test_table_has_one_row_per_variant() -> None:
    table = factor_facts(all_ranks(2.0, UP, DOWN, moved=1.0), 1).table
    assert table is not None
    assert table.title == scale_factor.TITLE
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "experts": 2.0, "router": 1.0, "others": 1.0, "inputs": None,
        "experts moved": 1.0, "others moved": 1.0, "loss": 1.0,
    }  # fmt: skip
    healthy = factor_facts(job({}, {}, moved=1.0), None).table
    assert healthy is not None
    assert healthy.rows[0][0] == 1.0


def test_table_shows_different_factors_as_a_range() -> None:
    evidence = job({UP: error(2.0)}, {UP: error(3.0)}, moved=1.0)
    table = factor_facts(evidence, 1).table
    assert table is not None
    assert table.rows[0][0] == "2.000 to 3.000"
