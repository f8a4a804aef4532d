"""Each relation holds for a small model, and a failure that is planted in it is confirmed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moediag.lab.relations import cell, compiled, conditions, earlier_checkpoint, numerical
from moediag.lab.relations.known_relations import RELATIONS
from moediag.lab.step.models import release_families
from moediag.protocol import ModelSpec, RelationOutcome, RelationTask, Trial
from tests.unit.planted_model import Planted, case

# Relation, planted failure, the ways that must show it.
FAILURES = [
    ("attention-implementations", "sdpa", {"sdpa"}),
    ("checkpointing", "recomputed", {"non-reentrant", "reentrant"}),
    ("padding", "mask", {"left"}),
    ("packing", "documents", {"position-ids", "boundaries"}),
    ("batch", "rows", {"alone"}),
    ("causality", "later", {"other-later-tokens", "no-later-tokens"}),
    ("use-cache", "cache", {"token-by-token", "in-two-parts"}),
    ("accumulation", "items", {"cross-entropy", "auxiliary-loss"}),
    ("accumulation", "auxiliary", {"auxiliary-loss"}),
    ("gradient", "gradient", {"backward"}),
    ("reached-parameters", "unreached", {"backward"}),
    ("expert-implementations", "grouped_mm", {"grouped_mm", "grouped_mm one-token"}),
    ("expert-implementations", "eager", {
        "batched_mm", "batched_mm one-token", "grouped_mm", "grouped_mm one-token",
    }),
    ("plans", "plan", {"tp-plan"}),
    ("save-and-load", "loaded wrong", {"whole", "sharded", "bfloat16", "base-model"}),
    ("trainable-parameters", "frozen", {"from-pretrained"}),
    ("one-dtype", "kept wide", {"bfloat16"}),
    ("compile", "compiled", {"aot_eager"}),
]  # fmt: skip
RELATION = {relation.name: relation for relation in RELATIONS}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_families, "model_class", lambda family: Planted)
    monkeypatch.setattr(compiled, "SECONDS", 300.0)  # of a slow machine


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in FAILURES))
def test_a_relation_holds_for_a_right_model(name: str) -> None:
    found = conditions.outcomes(RELATION[name], case())
    assert {one.way: one.holds for one in found} == dict.fromkeys((o.way for o in found), True)


@pytest.mark.parametrize(("name", "fault", "ways"), FAILURES)
def test_a_planted_failure_is_confirmed(name: str, fault: str, ways: set[str]) -> None:
    found = conditions.outcomes(RELATION[name], case(fault))
    assert {one.way for one in found if one.confirmed} == ways, found


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [("", ()), ("not saved", ("missing head.bias",)), ("loaded wrong", ("logits",))],
)
def test_a_checkpoint_of_an_earlier_release(
    tmp_path: Path, fault: str, wrong: tuple[str, ...]
) -> None:
    earlier_checkpoint.save(case(fault), tmp_path)
    (found,) = conditions.outcomes(
        RELATION["earlier-checkpoint"], replace(case(fault), earlier=str(tmp_path))
    )
    assert (found.holds, found.confirmed) == (not wrong, bool(wrong))
    assert all(name in found.text for name in wrong)


@pytest.mark.parametrize(
    ("slope", "decides"), [(1.01, True), (1.03, False), (1.09, False), (0.85, False)]
)
def test_finite_differences_must_agree_with_the_plain_gradient_alone(
    monkeypatch: pytest.MonkeyPatch, slope: float, decides: bool
) -> None:
    """The gradients differ by 0.1 at one place."""
    monkeypatch.setattr(numerical, "derivative", lambda *_at: slope)
    name = "gradient of w"
    plain, other = {name: torch.tensor([3.0, 1.0])}, {name: torch.tensor([3.0, 1.1])}
    assert numerical.sides_with_plain(case(), [name], plain, other) is decides
    assert numerical.sides_with_plain(case(), ["loss"], plain, other) is None


class TestCell:
    """One relation on one family, as a hunt runs it."""

    @pytest.fixture(autouse=True)
    def here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Both are settings of the process.
        monkeypatch.setattr(cell, "_bound_memory", lambda: None)
        monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_args, **_named: None)
        monkeypatch.setattr(release_families, "find", {"planted": case().family}.get)

    def outcome(
        self, monkeypatch: pytest.MonkeyPatch, *faults: str, family: str = "planted", **task: str
    ) -> RelationOutcome:
        monkeypatch.setattr(cell, "Case", lambda *_args, **_named: case(*faults))
        trial = Trial(
            "cell", "hunt", "cell", task=RelationTask(**task), model=ModelSpec(family=family)
        )
        return cell.run(trial)

    def test_a_relation_with_its_conditions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.outcome(monkeypatch, "later", relation="causality")
        assert [way.confirmed for way in found.ways] == [True, True]
        assert (found.family, found.relation, found.problem) == ("planted", "causality", "")

    def test_one_way_without_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "no-later-tokens"
        found = self.outcome(monkeypatch, "later", relation="causality", way=name)
        assert [(way.way, way.holds, way.conditions) for way in found.ways] == [(name, False, {})]
        assert found.model == "Planted"
        unknown = self.outcome(monkeypatch, relation="causality", way="other")
        assert unknown.applicable == "the release has no other here"

    @pytest.mark.parametrize(
        ("relation", "family", "applicable", "problem"),
        [
            ("unknown", "planted", "", "there is no relation unknown"),
            ("causality", "unknown", "the release has no such family", ""),
            ("earlier-checkpoint", "planted", "there is no earlier release (--against)", ""),
        ],
    )
    def test_what_cannot_be_checked_says_why(
        self,
        monkeypatch: pytest.MonkeyPatch,
        relation: str,
        family: str,
        applicable: str,
        problem: str,
    ) -> None:
        found = self.outcome(monkeypatch, relation=relation, family=family)
        assert (found.ways, found.applicable or "", found.problem) == ([], applicable, problem)
