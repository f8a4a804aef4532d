"""Replicated state: differences are found, equal replicas are clean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers.replicas import replica_facts
from moediag.evidence.model import Evidence
from moediag.protocol import GradientError, Replica, Sketch, StepReplicas
from moediag.result import Verdict
from tests.unit.evidence_builder import PARAMETERS, fsdp2_job, measured

GATE, EXPERTS = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"


def sketch(size: float, *off: float) -> Sketch:
    """A tensor of L2 norm ``size``; ``off``: by how much its first projections differ."""
    projections = [size * (-1) ** i for i in range(16)]
    return Sketch(size, [p + d for p, d in zip(projections, [*off, *[0.0] * 16], strict=False)])


def held(weight: Sketch, gradient: Sketch | None, piece: str = ":", kind: str = "plain") -> Replica:
    return Replica(piece, kind, weight, gradient, gradient is not None)


def step(parameters: dict[str, Replica], **facts: object) -> StepReplicas:
    given = {"optimizer_steps": [1.0, 1.0], "learning_rates": [1e-3], "local_norm": 1.2, **facts}
    return StepReplicas(parameters, **given)  # type: ignore[arg-type]


START = step({GATE: Replica(":", "plain", sketch(10.0))}, optimizer_steps=[])
AFTER = step({GATE: held(sketch(10.0, 0.5), sketch(1.0))})


def job(world: int = 2) -> Evidence:
    """Healthy: gradients as in the reference, one replicated parameter, one step."""
    evidence = measured(fsdp2_job(*[set()] * world).run())
    for rank in range(world):
        evidence = having(evidence, rank, {"0": START, "1": AFTER})
    return evidence


def having(evidence: Evidence, rank: int, steps: dict[str, StepReplicas]) -> Evidence:
    return outcome(evidence, rank, replicas=steps)


def outcome(evidence: Evidence, rank: int, **changes: object) -> Evidence:
    seen = evidence.ranks[rank]
    assert seen.outcome is not None
    changed = replace(seen, outcome=replace(seen.outcome, **changes))
    return replace(evidence, ranks={**evidence.ranks, rank: changed})


def norms(evidence: Evidence, values: Sequence[float], **more: object) -> Evidence:
    for rank, value in enumerate(values):
        evidence = outcome(evidence, rank, gradient_norms=[value], **more)
    return evidence


class TestAgreement:
    def test_equal_replicas_are_clean(self) -> None:
        facts = replica_facts(job(4))
        assert (facts.found, facts.compared, facts.wrong_norm) == ((), 1, None)
        assert diagnose(job(4)).verdict == Verdict.CLEAN

    def test_different_slices_of_a_parameter_may_differ(self) -> None:
        evidence = job()
        for rank in range(2):
            mine = held(sketch(1.0 + rank), sketch(3.0 - rank), f"{4 * rank}:{4 * rank + 4},:,:")
            evidence = having(evidence, rank, {"1": step({EXPERTS: mine})})
        assert replica_facts(evidence).found == ()
        assert replica_facts(evidence).compared == 0

    @pytest.mark.parametrize(("dtype", "off", "differs"), [
        ("float32", 1e-6, False), ("float32", 1e-2, True),
        ("bfloat16", 1e-2, False), ("bfloat16", 0.5, True),
    ])  # fmt: skip
    def test_rounding_is_not_a_difference(self, dtype: str, off: float, differs: bool) -> None:
        evidence = job()
        for rank in range(2):
            mine = held(sketch(10.0), sketch(1.0, off * rank))
            evidence = having(evidence, rank, {"1": step({GATE: mine}, dtype=dtype)})
        assert bool(replica_facts(evidence).found) is differs

    def test_ranks_without_data_are_not_culprits(self) -> None:
        evidence = having(job(), 1, {})
        assert replica_facts(evidence).found == ()
        assert diagnose(outcome(job(), 1, gradient_norms=[None])).verdict == Verdict.CLEAN


class TestTensors:
    def test_a_different_gradient_is_reported_with_its_consequence(self) -> None:
        other = step({GATE: held(sketch(10.0, -0.5), sketch(1.0, 2.0))})
        found = diagnose(having(job(), 1, {"0": START, "1": other}))
        assert found.verdict == Verdict.REPLICA_DIVERGENCE
        assert found.signature == "replica-divergence:gradients:no-rank"
        assert (found.culprits, found.victims) == ((), ())
        assert found.cause.startswith(
            "The gradients before clipping of 1 parameter differ between ranks that hold the same "
            f"slice ({GATE}); worst {GATE} on ranks 0, 1: 5.0e-01 of their norm."
        )
        assert "After step 1 the weights of 1 parameter differ between replicas" in found.cause

    def test_one_rank_against_a_majority_is_the_culprit(self) -> None:
        other = step({GATE: held(sketch(10.0, 0.5), sketch(1.0, 2.0))})
        found = diagnose(having(job(4), 2, {"0": START, "1": other}))
        assert (found.culprits, found.victims) == ((2,), (0, 1, 3))
        assert found.signature == "replica-divergence:gradients:one-rank"

    def test_a_two_to_two_split_has_no_culprit(self) -> None:
        other = step({GATE: held(sketch(10.0, 0.5), sketch(1.0, 2.0))})
        evidence = having(having(job(4), 2, {"0": START, "1": other}), 3, {"0": START, "1": other})
        assert diagnose(evidence).culprits == ()

    def test_a_gradient_on_some_ranks_only_is_a_difference(self) -> None:
        other = step({GATE: held(sketch(10.0, 0.5), None)})
        found = diagnose(having(job(), 1, {"0": START, "1": other}))
        assert "some of ranks 0, 1 have a gradient and some have none" in found.cause

    def test_weights_that_differ_before_training_take_precedence(self) -> None:
        start = step({GATE: Replica(":", "plain", sketch(10.0, 3.0))}, optimizer_steps=[])
        found = diagnose(having(job(), 1, {"0": start, "1": AFTER}))
        assert found.signature == "replica-divergence:weights:no-rank"
        assert found.cause.startswith("Before training the weights of 1 parameter differ")

    def test_weight_differences_are_relative_to_the_update(self) -> None:
        """The update has size 0.125; 1e-5 of it is rounding, half of it is not."""
        for off, differs in ((1e-6, False), (0.25, True)):
            other = step({GATE: held(sketch(10.0, 0.5 + off), sketch(1.0))})
            facts = replica_facts(having(job(), 1, {"0": START, "1": other}))
            assert bool(facts.found) is differs
        (found,) = facts.found
        assert (found.what, found.worst, found.slice) == ("weights", GATE, ":")
        assert found.size == pytest.approx(0.25 / 0.75, rel=1e-6)


class TestOptimizerState:
    def moments(self, off: float = 0.0, gradient: float = 1.0) -> dict[str, StepReplicas]:
        mine = replace(
            held(sketch(10.0, 0.5), sketch(gradient)), state={"exp_avg": sketch(0.1, off)}
        )
        return {"0": START, "1": step({GATE: mine, "other": held(sketch(1.0), sketch(1.0))})}

    def test_equal_moments_are_clean(self) -> None:
        evidence = having(having(job(), 0, self.moments()), 1, self.moments(1e-6))
        assert diagnose(evidence).verdict == Verdict.CLEAN

    def test_different_moments_are_found_while_weights_are_equal(self) -> None:
        found = diagnose(having(having(job(), 0, self.moments()), 1, self.moments(0.1)))
        assert found.signature == "replica-divergence:optimizer state:no-rank"
        assert found.cause == (
            "The optimizer's tensors of 1 parameter differ between ranks that hold the same slice "
            f"({GATE} exp_avg); worst {GATE} exp_avg on ranks 0, 1: 2.5e-01 of their norm."
        )

    def test_differences_of_moments_of_tiny_gradients_are_ignored(self) -> None:
        one, other = self.moments(gradient=1e-6), self.moments(0.1, gradient=1e-6)
        evidence = having(having(job(), 0, one), 1, other)
        assert replica_facts(evidence).found == ()

    def test_a_rank_without_moments_is_not_a_culprit(self) -> None:
        evidence = having(job(), 0, self.moments())
        assert replica_facts(evidence).found == ()


class TestNumbers:
    @pytest.mark.parametrize(("facts", "what", "text"), [
        ({"optimizer_steps": [1.0, 2.0]}, "optimizer steps",
         "The optimizer's step count differs between ranks: rank 0 1, rank 1 2"),
        ({"learning_rates": [2e-3]}, "learning rate",
         "The learning rate differs between ranks: rank 0 0.001, rank 1 0.002"),
    ])  # fmt: skip
    def test_different_steps_and_learning_rates_are_found(
        self, facts: dict[str, object], what: str, text: str
    ) -> None:
        other = step(AFTER.parameters, **facts)
        found = diagnose(having(job(), 1, {"0": START, "1": other}))
        assert found.signature == f"replica-divergence:{what}:no-rank"
        assert text in found.cause

    def test_a_learning_rate_rounded_to_float32_is_the_same(self) -> None:
        other = step(AFTER.parameters, learning_rates=[1e-3 * (1 + 2.0**-24)])
        assert replica_facts(having(job(), 1, {"0": START, "1": other})).found == ()

    def test_a_norm_of_local_shards_is_explained(self) -> None:
        evidence = norms(job(), [2.254, 2.301], reference_norms=[3.221])
        for rank, alone in enumerate((2.254, 2.301)):
            evidence = having(evidence, rank, {"1": step(AFTER.parameters, local_norm=alone)})
        found = diagnose(evidence)
        assert found.verdict == Verdict.REPLICA_DIVERGENCE
        assert found.cause == (
            "The gradient norm differs between ranks: rank 0 2.2540, rank 1 2.3010: each is the "
            "norm of what that rank holds, nothing is summed over ranks, so each clips by a "
            "different factor. The norm of the whole gradient is 3.2210 (single process)."
        )

    def test_a_norm_without_plain_experts_of_other_ranks_is_explained(self) -> None:
        """Everything else has norm 3; rank r's experts r + 1."""
        evidence = norms(job(), [math.sqrt(10), math.sqrt(13)])
        for rank in range(2):
            span = f"{4 * rank}:{4 * rank + 4},:,:"
            mine = {EXPERTS: held(sketch(1.0), sketch(1.0 + rank), span)}
            evidence = having(evidence, rank, {"1": step({**AFTER.parameters, **mine})})
        found = diagnose(evidence)
        assert (
            "each rank sums only its own experts (experts 0-3 on rank 0, 4-7 on rank 1, plain "
            f"tensors in {EXPERTS}), so each clips by a different factor" in found.cause
        )

    def test_a_norm_without_experts_of_other_meshes_is_explained(self) -> None:
        """Ranks 0 and 2 hold experts 0-3, half each, and sum over their own mesh alone; so do
        ranks 1 and 3 with the others. Everything else has norm 3, each half r % 2 + 1."""
        evidence = norms(
            job(4), [math.sqrt(11), math.sqrt(17)] * 2, reference_norms=[math.sqrt(19)]
        )
        for rank in range(4):
            ep, first = rank % 2, 4 * (rank % 2) + 2 * (rank // 2)
            mesh = f"dp_shard [{ep}, {ep + 2}]"
            piece = held(sketch(1.0), sketch(1.0 + ep), f"{first}:{first + 2},:,:", mesh)
            evidence = having(evidence, rank, {"1": step({**AFTER.parameters, EXPERTS: piece})})
        found = diagnose(evidence)
        assert found.verdict == Verdict.REPLICA_DIVERGENCE
        assert (found.culprits, found.signature) == ((), "replica-divergence:gradient norm:no-rank")
        assert (
            "each rank sums only its mesh's experts (experts 0-3 on ranks 0, 2, 4-7 on ranks 1, 3, "
            f"DTensors in {EXPERTS}), so each clips by a different factor" in found.cause
        )

    def test_experts_on_other_meshes_explain_only_matching_differences(self) -> None:
        evidence = norms(job(4), [3.0, 3.7, 3.0, 3.7])
        for rank in range(4):
            mesh = f"dp_shard [{rank % 2}, {rank % 2 + 2}]"
            piece = held(sketch(1.0), sketch(1.0), f"{2 * rank}:{2 * rank + 2},:,:", mesh)
            evidence = having(evidence, rank, {"1": step({**AFTER.parameters, EXPERTS: piece})})
        assert "sums only" not in diagnose(evidence).cause

    def test_an_unexplained_norm_is_reported_without_a_reason(self) -> None:
        found = diagnose(norms(job(4), [1.2, 1.2, 1.3, 1.2]))
        assert found.cause == (
            "The gradient norm differs between ranks: rank 0 1.2000, rank 1 1.2000, rank 2 1.3000, "
            "rank 3 1.2000, so each clips by a different factor."
        )
        assert found.culprits == (2,)

    def test_similar_norms_are_not_a_majority(self) -> None:
        found = diagnose(norms(job(4), [1.0, 1.00001, 1.00002, 1.1]))
        assert found.verdict == Verdict.REPLICA_DIVERGENCE
        assert found.culprits == ()

    def test_rounding_of_a_norm_is_not_a_difference(self) -> None:
        assert diagnose(norms(job(), [1.2, 1.2000001])).verdict == Verdict.CLEAN


class TestAgainstTheReference:
    def test_a_norm_wrong_on_every_rank_is_found(self) -> None:
        found = diagnose(norms(job(), [2.4, 2.4], reference_norms=[1.2]))
        assert found.verdict == Verdict.WRONG_GRADIENTS
        assert found.signature == "wrong-gradients:clipping norm:no-rank"
        assert "the norm used for clipping is 2 times the true one on every rank" in (
            found.cause.lower()
        )

    def test_a_correct_norm_is_clean(self) -> None:
        assert diagnose(norms(job(), [1.2, 1.2], reference_norms=[1.2004])).verdict == "clean"

    def test_bf16_has_a_larger_tolerance(self) -> None:
        evidence = norms(job(), [1.2, 1.2], reference_norms=[1.25])
        assert diagnose(evidence).verdict == Verdict.WRONG_GRADIENTS
        for rank in range(2):
            evidence = having(evidence, rank, {"1": step({}, dtype="bfloat16")})
        assert diagnose(evidence).verdict == Verdict.CLEAN

    def test_different_replicas_explain_wrong_gradients_of_the_same_step(self) -> None:
        evidence = measured(fsdp2_job(set(), set()).run(), wrong=PARAMETERS[:1])
        for rank in range(2):
            mine = held(sketch(10.0), sketch(1.0, 2.0 * rank))
            evidence = having(evidence, rank, {"1": step({GATE: mine})})
        found = diagnose(evidence)
        assert found.verdict == Verdict.WRONG_GRADIENTS
        assert found.signature == "wrong-gradients:replicas differ:no-rank"
        assert "gradients before clipping of 1 parameter differ" in found.cause

    def test_a_norm_that_differed_a_step_earlier_is_the_first_failure(self) -> None:
        evidence = norms(job(), [1.2, 1.3])
        wrong = {PARAMETERS[0]: GradientError(3e-3, 0.1, wrong=True)}
        for rank, seen in evidence.ranks.items():
            assert seen.outcome is not None
            gradients = {**seen.outcome.gradients, "2": wrong}
            evidence = outcome(evidence, rank, gradients=gradients)
        assert diagnose(evidence).verdict == Verdict.REPLICA_DIVERGENCE
