"""What lives during a step, from steps of a few layers on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moediag.lab.check.activations import chosen, extended
from moediag.protocol import MemoryPhase, MemoryTimeline
from moediag.recorder.not_applicable import NotApplicable
from tests.unit.worker.checked_model import checked


def test_the_first_and_the_last_layer_of_each_kind_are_kept() -> None:
    assert chosen("aaaa") == ([0, 3], [(1, 2)])
    assert chosen("aabbbb") == ([0, 1, 2, 5], [(3, 2)])
    assert chosen("abab") == ([0, 1, 2, 3], [])
    assert chosen("a") == ([0], [])
    with pytest.raises(NotApplicable, match="5 kinds"):
        chosen("abcde")


def test_each_layer_more_adds_what_one_more_added() -> None:
    base = [MemoryPhase("loss", parameters=4, activations=10), MemoryPhase("start", parameters=4)]
    one = [MemoryPhase("loss", parameters=5, activations=13), MemoryPhase("start", parameters=5)]
    found = extended(base, [(one, 10)])
    assert found[0] == MemoryPhase("loss", parameters=14, activations=40)
    assert found[1] == MemoryPhase("start", parameters=14) and found[0].total == 54
    assert extended(base, []) == base


def timeline(tmp_path: Path, layers: int, **asked: Any) -> MemoryTimeline:
    """Of a model with one dense layer first."""
    place = tmp_path / f"{layers}-{asked}".replace("/", "")
    place.mkdir()
    found = checked(
        place, {"dp_shard": 2}, length=16, asked={"batch": 2, **asked}, num_hidden_layers=layers,
        mlp_only_layers=[0], num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    assert not any("memory" in text for text in found.not_seen), found.not_seen
    return found.timeline


def test_the_full_depth_is_that_of_a_model_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timeline(tmp_path, 5)
    assert found.layers == 3 and found.worst == []
    every = lambda kinds: (list(range(len(kinds))), [])  # noqa: E731
    monkeypatch.setattr("moediag.lab.check.activations.chosen", every)
    whole, recomputed = (
        {phase.name: phase for phase in timeline(tmp_path, 5, recompute=kind).phases}
        for kind in ("none", "layers")
    )
    assert [whole[phase.name] for phase in found.phases] == found.phases
    peak = max(whole.values(), key=lambda phase: phase.total)
    assert peak.name in {phase.name for phase in found.phases}
    less, more = recomputed["head and loss"], whole["head and loss"]
    assert less.activations < more.activations and less.parameters == more.parameters
