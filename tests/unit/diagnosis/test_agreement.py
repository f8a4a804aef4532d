"""Sides, minorities and distances of values that ranks hold."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.diagnosis.numbers import agreement


@given(st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1))
def test_sides_divide_the_ranks_and_a_minority_is_outside_more_than_half(
    values: dict[int, str],
) -> None:
    sides = agreement.sides(values)
    assert {rank: value for value, who in sides.items() for rank in who} == values
    assert all(list(who) == sorted(who) for who in sides.values())
    assert [who[0] for who in sides.values()] == sorted(who[0] for who in sides.values())
    outside = agreement.minority(sides.values())
    right = {values[rank] for rank in values if rank not in outside}
    if outside:
        assert len(right) == 1
        assert 2 * len(outside) < len(values)
    else:
        assert len(sides) == 1 or 2 * max(map(len, sides.values())) <= len(values)


@pytest.mark.parametrize(
    ("values", "tolerance", "differ"),
    [
        ((1.0, 1.0), 0.0, False),
        ((1.0, 1.1), 0.0, True),
        ((100.0, 101.0), 0.01, False),
        ((100.0, 102.0), 0.01, True),
        ((-1.0, 1.0), 0.5, True),
        ((0.0, 1e-9), 1e-6, True),
        ((inf, inf), 0.1, False),
        ((inf, 1.0), 0.1, True),
        ((nan, 1.0), 0.1, False),
        ((), 0.1, False),
    ],
)
def test_numbers_lie_apart_beyond_the_tolerance(
    values: tuple[float, ...], tolerance: float, differ: bool
) -> None:
    assert agreement.apart(values, tolerance) is differ


def test_sketches_tell_how_far_tensors_lie_apart() -> None:
    assert agreement.far([(1.0, 2.0), (1.0, 2.0)]) == 0.0
    assert agreement.far([(1.0, 2.0), (-1.0, 2.0)]) == 1.0
    assert agreement.far([(0.0, 4.0), (0.0, 1.0)]) == 0.75
    assert agreement.far([(0.0, 0.0), (0.0, 0.0)]) == 0.0
    assert agreement.far([(inf, 1.0), (0.0, 1.0)]) == 0.0
