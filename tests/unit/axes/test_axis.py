"""The answers of each mesh axis, and that they are consistent."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.axes import AXES, CP, DP_REPLICATE, DP_SHARD, EP, ETP, PP, TP, Axis, Layout, find
from moediag.axes.axis import register, supported
from moediag.errors import LayoutError

BATCHES = ("distinct", "per-replica", "one-token")


def test_axes_are_in_mesh_order() -> None:
    assert AXES == ["pp", "dp_replicate", "dp_shard", "cp", "ep", "etp", "tp"]


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_equals_its_name(axis: Axis) -> None:
    name = str(axis)
    assert type(name) is str and name == axis and hash(name) == hash(axis)
    assert find(name) is axis
    assert json.dumps({axis: axis}) == f'{{"{name}": "{name}"}}'
    assert copy.deepcopy(axis) is axis and pickle.loads(pickle.dumps(axis)) is axis
    assert axis.about and axis.alone and axis.__doc__


def test_an_unknown_axis_name_is_refused() -> None:
    with pytest.raises(LayoutError, match="unknown mesh axis 'sp'; the axes are pp, "):
        find("sp")
    with pytest.raises(LayoutError, match="there is a mesh axis tp already"):
        register(type(TP)())


def test_the_step_under_test_runs_all_axes() -> None:
    assert supported() == "pp, dp_replicate, dp_shard, cp, ep, etp and tp"


@pytest.mark.parametrize(
    ("axis", "distinct", "per_replica", "one_token"),
    [
        (DP_REPLICATE, False, False, False),
        (DP_SHARD, False, False, False),
        (EP, False, True, False),
        (ETP, True, True, True),
        (TP, True, True, True),
        (CP, True, True, True),
        (PP, True, True, True),
    ],
)
def test_axes_that_share_a_batch_are_known(
    axis: Axis, distinct: bool, per_replica: bool, one_token: bool
) -> None:
    assert [axis.shares_batch(b) for b in BATCHES] == [distinct, per_replica, one_token]


@pytest.mark.parametrize(
    ("axis", "experts", "others"),
    [
        (DP_REPLICATE, True, True),
        (DP_SHARD, False, False),
        (EP, False, True),
        (ETP, False, True),
        (TP, False, False),
        (CP, True, True),
        (PP, False, False),
    ],
)
def test_axes_with_equal_parameters_are_known(axis: Axis, experts: bool, others: bool) -> None:
    assert (axis.equal(experts=True), axis.equal(experts=False)) == (experts, others)


@given(st.sampled_from(AXES), st.integers(0, 40), st.integers(1, 8), st.booleans())
def test_shards_cover_the_tensor_once_or_are_replicas(
    axis: Axis, rows: int, size: int, experts: bool
) -> None:
    pieces = [axis.mine(rows, index, size, experts) for index in range(size)]
    if axis.divides(experts) and axis is not PP:
        assert [row for piece in pieces for row in piece] == list(range(rows))
        assert max(map(len, pieces)) <= -(-rows // size)
    else:
        assert all(piece == range(rows) for piece in pieces)


@given(st.sampled_from(AXES), st.integers(0, 40), st.booleans())
def test_an_axis_of_size_one_has_no_effect(axis: Axis, rows: int, experts: bool) -> None:
    assert axis.mine(rows, 0, 1, experts) == range(rows)
    assert all(axis.divisor(1, batches) == 1 for batches in BATCHES)
    assert Layout({axis: 1}).active == ()


@pytest.mark.parametrize(
    ("axis", "distinct", "per_replica"),
    [(DP_REPLICATE, 4, 4), (DP_SHARD, 4, 4), (EP, 4, 1), (CP, 4, 4), (TP, 1, 1), (PP, 1, 1)],
)
def test_gradient_averaging_depends_on_the_axis(
    axis: Axis, distinct: int, per_replica: int
) -> None:
    assert axis.divisor(4, "distinct") == distinct
    assert axis.divisor(4, "per-replica") == per_replica
    both = Layout({DP_SHARD: 2, axis: 4}) if axis is not DP_SHARD else Layout({axis: 4})
    assert both.divisor("distinct") == distinct * (1 if axis is DP_SHARD else 2)
