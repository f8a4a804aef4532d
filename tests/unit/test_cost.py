from __future__ import annotations

import pytest

from moediag.cost import ratios


def test_a_ratio_is_taken_round_by_round():
    # The machine was twice as slow in round 2; the fix costs 10 % in every round.
    found = ratios({"": [1.0, 2.0, 1.0], "again": [1.0, 2.0, 1.0], "touch": [1.1, 2.2, 1.1]})
    assert found["touch"].median == pytest.approx(1.1)
    assert found["touch"].quartiles == pytest.approx((1.1, 1.1))


def test_the_unfixed_step_shows_the_noise_of_its_second_timing():
    found = ratios({"": [1.0, 1.0, 1.0, 1.0], "again": [0.9, 1.0, 1.1, 1.2]})
    assert found[""].median == 1.0
    low, high = found[""].quartiles
    assert low < 1.05 < high
    assert "again" not in found


def test_too_few_rounds_give_no_ratio():
    assert ratios({"": [1.0], "touch": [1.0]}) == {}
    assert ratios({}) == {}
