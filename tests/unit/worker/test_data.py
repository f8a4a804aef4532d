"""Who shares a batch with whom, held against the layout's own arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moediag.axes.layout import AXES, Layout  # noqa: E402
from moediag.protocol import ModelSpec, SkewSpec, Trial  # noqa: E402
from moediag.worker import data  # noqa: E402


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        ({"dp_shard": 4}, [0, 1, 2, 3]),
        ({"ep": 4}, [0, 0, 0, 0]),
        ({"dp_shard": 2, "ep": 2}, [0, 0, 2, 2]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
        ({"pp": 2, "dp_shard": 2}, [0, 1, 0, 1]),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, [0] * 4 + [4] * 4),
        ({}, [0]),
    ],
)
def test_replicas(axes: dict[str, int], first: list[int]) -> None:
    assert [data.replica(axes, rank) for rank in range(len(first))] == first


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 3), max_size=4))
def test_a_replica_is_all_ranks_that_differ_only_inside_a_model(axes: dict[str, int]) -> None:
    layout = Layout(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        where = layout.coordinates(rank)
        groups.setdefault(tuple(where[a] for a in where if a.startswith("dp_")), []).append(rank)
    for ranks in groups.values():
        assert {data.replica(layout.axes, rank) for rank in ranks} == {min(ranks)}


def test_only_replicas_share_their_batch() -> None:
    trial = Trial(
        "t", "s", "v", world_size=4, layout={"dp_shard": 2, "ep": 2}, model=ModelSpec(),
        skew=SkewSpec(batches="per-replica"),
    )  # fmt: skip
    batches = [data.batch(trial, rank, 1, 0) for rank in range(4)]
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[2], batches[3])
    assert not torch.equal(batches[0], batches[2])
