"""Sides of ranks, the minority, and differences of sketches."""

from __future__ import annotations

import math

import pytest

from moediag.diagnosis.numbers import agreement


def test_the_largest_side_is_first() -> None:
    assert agreement.sides({0: "b", 1: "a", 2: "a", 3: "b"}) == ((0, 3), (1, 2))
    assert agreement.sides({2: "a", 1: "b", 0: "a"}) == ((0, 2), (1,))


@pytest.mark.parametrize(("sides", "outside"), [
    (((0, 1, 2), (3,)), (3,)), (((4,), (0, 1, 2), (3,)), (3, 4)), (((0, 1), (2, 3)), ()),
    (((0,), (1,), (2,)), ()), (((0, 1), (2,), (3,)), ()), (((0, 1),), ()),
])  # fmt: skip
def test_the_minority_is_outside_a_strict_majority(
    sides: tuple[tuple[int, ...], ...], outside: tuple[int, ...]
) -> None:
    assert agreement.minority(sides) == outside


def test_a_difference_is_a_part_of_the_largest_norm() -> None:
    assert agreement.difference([(1.0, 4.0), (2.0, 4.0)]) == 0.25
    assert agreement.difference([(1.0, 4.0), (1.0, 2.0)]) == 0.5
    assert agreement.difference([(0.0, 0.0), (0.0, 0.0)]) == 0.0
    assert agreement.difference([(math.nan, 1.0), (0.0, 1.0)]) == 0.0
