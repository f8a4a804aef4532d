"""The peak that `moediag check` tells against what torch counts on real gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import check_memory
from bench.check_memory import NEAR, Case
from moediag.protocol import MemoryTimeline
from tests.e2e.pipeline import need
from tests.unit.worker.checked_model import checked

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]
CASES: tuple[Case, ...] = (
    ("experts", "bfloat16", "none", {"dp_shard": 2}, {}),
    ("two kinds of layers", "float32", "layers", {"dp_shard": 2}, {}),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_within_five_percent(case: Case, tmp_path: Path) -> None:
    need(check_memory.RELEASE)
    found = check_memory.measure(case, tmp_path)
    assert found.problem == "" and abs(found.difference) <= NEAR, found


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


def test_the_full_depth_is_that_of_a_model_that_has_it(tmp_path: Path) -> None:
    found = timeline(tmp_path, 5)
    assert found.layers == 3 and found.worst == [] and found.events == []
    ran = [timeline(tmp_path, 5, recompute=kind, reserved=True) for kind in ("none", "layers")]
    whole, recomputed = ({phase.name: phase for phase in one.phases} for one in ran)
    for one in ran:  # on streams of their own for copies, all-gathers and reductions
        assert one.layers == 5 and 0 < one.before < len(one.events)
        assert len({stream for _, _, stream in one.events}) > 1
        live: dict[int, int] = {}
        most = 0
        for tensor, size, _ in one.events:
            live[tensor] = size
            most = max(most, sum(live.values()))
        assert max(phase.total for phase in one.phases) <= most
    assert [whole[phase.name] for phase in found.phases] == found.phases
    peak = max(whole.values(), key=lambda phase: phase.total)
    assert peak.name in {phase.name for phase in found.phases}
    less, more = recomputed["head and loss"], whole["head and loss"]
    assert less.activations < more.activations and less.parameters == more.parameters
