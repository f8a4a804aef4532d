"""The rank grid: every rank in exactly one group per axis, and refusals that print every factor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.axes import AXES, Layout
from moediag.errors import LayoutError

layouts = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), max_size=4).map(Layout)


@given(layouts)
def test_every_rank_is_in_exactly_one_group_per_axis(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(r for g in groups for r in g) == list(range(layout.world_size))
        assert {len(g) for g in groups} == {layout.size(axis)}


@given(layouts)
def test_members_of_a_group_differ_in_its_axis_only(layout: Layout) -> None:
    for axis in layout.axes:
        for group in layout.groups(axis):
            places = [layout.coordinates(r) for r in group]
            assert [p.pop(axis) for p in places] == list(range(layout.size(axis)))
            assert all(p == places[0] for p in places)


@given(layouts, st.data())
def test_rank_inverts_coordinates(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.rank(layout.coordinates(rank)) == rank


@given(layouts, st.sampled_from(AXES), st.integers(1, 8))
def test_world_is_divided_by_the_other_axes(layout: Layout, axis: str, left: int) -> None:
    others = {a: s for a, s in layout.axes.items() if a != axis}
    world = math.prod(others.values()) * left
    resolved = Layout.resolve({axis: "world", **others}, world)
    assert resolved.size(axis) == left
    assert resolved.world_size == world


def test_the_innermost_axis_holds_neighbours() -> None:
    layout = Layout({"tp": 2, "dp_shard": 3})
    assert list(layout.axes) == ["dp_shard", "tp"]
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5))
    assert layout.groups("dp_shard") == ((0, 2, 4), (1, 3, 5))
    assert layout.groups("ep") == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert layout.coordinates(3) == {"dp_shard": 1, "tp": 1}


def test_layout_is_printed_as_text() -> None:
    layout = Layout({"dp_shard": 2, "ep": 2, "tp": 2})
    assert str(layout) == "dp_shard=2 x ep=2 x tp=2 = 8 ranks"
    assert layout.grid().splitlines() == [
        "                 tp ->",
        "dp_shard=0 ep=0  0 1",
        "dp_shard=0 ep=1  2 3",
        "dp_shard=1 ep=0  4 5",
        "dp_shard=1 ep=1  6 7",
    ]
    assert Layout({"dp_shard": 12}).grid().splitlines()[1].split()[-1] == "11"
    assert Layout({"dp_shard": 1}).grid() == "0"


def test_an_empty_request_is_dp_shard() -> None:
    assert Layout.resolve({}, 4).axes == {"dp_shard": 4}


@pytest.mark.parametrize(
    ("request_", "world", "parts"),
    [
        ({"dp_shard": 4, "ep": 2}, 6, ["dp_shard=4 x ep=2 = 8", "6 ranks"]),
        ({"dp_shard": "world", "ep": 4}, 6, ["dp_shard=world x ep=4", "6 ranks", "by 4"]),
        ({"dp_shard": "world", "ep": "world"}, 4, ["only one", "dp_shard and ep"]),
        ({"dp_shard": 0}, 4, ["dp_shard has size 0"]),
        ({"dp_shard": True}, 1, ["dp_shard has size True"]),
        ({"dp": "world"}, 4, ["unknown mesh axis 'dp'", "dp_shard"]),
        ({"dp_shard": "all"}, 4, ["dp_shard='all'"]),
        ({"dp_shard": "world"}, 0, ["0 ranks"]),
    ],
)
def test_an_error_lists_every_factor(
    request_: dict[str, int | str], world: int, parts: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.resolve(request_, world)
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match="dp_shard=4"):
        Layout({"dp_shard": 4}).coordinates(rank)


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
def test_ranks_that_hold_one_copy_of_the_model_share_a_batch(
    axes: dict[str, int], first: list[int]
) -> None:
    layout = Layout(axes)
    assert [layout.batch_source(rank, "per-replica") for rank in range(len(first))] == first


@given(layouts)
def test_a_shared_batch_belongs_to_the_lowest_rank_of_its_group(
    layout: Layout,
) -> None:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        where = layout.coordinates(rank)
        groups.setdefault(tuple(where[a] for a in where if a.data_parallel), []).append(rank)
    for ranks in groups.values():
        assert {layout.batch_source(rank, "per-replica") for rank in ranks} == {min(ranks)}


@given(layouts, st.sampled_from(["distinct", "per-replica", "one-token", "identical"]))
def test_the_owner_of_a_batch_uses_its_own(layout: Layout, batches: str) -> None:
    for rank in range(layout.world_size):
        source = layout.batch_source(rank, batches)
        assert source <= rank and layout.batch_source(source, batches) == source
    sources = {layout.batch_source(r, batches) for r in range(layout.world_size)}
    if batches != "identical":
        assert layout.shares_batches(batches) == (len(sources) < layout.world_size)


@given(layouts)
def test_active_axes_have_more_than_one_rank(layout: Layout) -> None:
    assert [layout.size(axis) > 1 for axis in AXES] == [axis in layout.active for axis in AXES]
    rank = layout.world_size - 1
    assert [layout.index(axis, rank) for axis in AXES] == [layout.size(axis) - 1 for axis in AXES]


def test_gradients_are_summed_over_ranks_with_tokens_of_their_own() -> None:
    layout = Layout({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2, "pp": 2})
    assert layout.sums(False, "") == ("dp_replicate", "dp_shard", "cp", "ep")
    assert layout.sums(True, "") == ("dp_replicate", "dp_shard", "cp")
    assert layout.sums(False, "per-replica") == ("dp_replicate", "dp_shard", "cp")
    assert Layout({"tp": 2, "dp_shard": 1}).sums(False, "") == ()
