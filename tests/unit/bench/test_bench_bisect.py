"""A bisect makes no more probes than halving and its checks require."""

from __future__ import annotations

from bench import bisect_probes


def test_with_both_ends_given_the_number_of_probes_is_minimal() -> None:
    assert bisect_probes.both_ends_given()[0] <= 1


def test_without_a_good_end_growing_steps_cost_at_most_half_more() -> None:
    assert bisect_probes.no_good_end()[0] <= 1.5
