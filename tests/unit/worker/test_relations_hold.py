"""Each relation holds for a small model, and a failure that is planted in it is confirmed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from moediag.worker.relations import conditions  # noqa: E402
from moediag.worker.relations.known_relations import RELATIONS  # noqa: E402
from tests.unit.planted_model import case  # noqa: E402

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
]
RELATION = {relation.name: relation for relation in RELATIONS}


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in FAILURES))
def test_a_relation_holds_for_a_right_model(name: str) -> None:
    found = conditions.outcomes(RELATION[name], case())
    assert {one.way: one.holds for one in found} == dict.fromkeys((o.way for o in found), True)


@pytest.mark.parametrize(("name", "fault", "ways"), FAILURES)
def test_a_planted_failure_is_confirmed(name: str, fault: str, ways: set[str]) -> None:
    found = conditions.outcomes(RELATION[name], case(fault))
    assert {one.way for one in found if one.confirmed} == ways, found
