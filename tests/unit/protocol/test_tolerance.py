"""Allowed differences by dtype."""

from __future__ import annotations

import pytest

from moediag.protocol import tolerance


def test_float32_has_the_floor_and_a_coarser_dtype_its_roundings() -> None:
    assert tolerance.GRADIENT.of("float32") == 1e-3
    assert tolerance.GRADIENT.of("bfloat16") == 0.1
    assert tolerance.GRADIENT.of("float32") < tolerance.GRADIENT.of("float16") < 0.1
    with pytest.raises(KeyError):
        tolerance.GRADIENT.of("float8")


def test_every_share_allows_less_than_a_missing_division_by_two() -> None:
    shares = [one for one in vars(tolerance).values() if isinstance(one, tolerance.Share)]
    assert len(shares) == 7
    for dtype in tolerance.ROUNDING:
        assert all(0 < one.of(dtype) < 0.5 for one in shares)
