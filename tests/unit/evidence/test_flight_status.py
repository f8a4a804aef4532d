"""How far groups got, by pg_status: the names of its numbers, and what is not certain."""

from __future__ import annotations

from typing import Any

import pytest

from moediag.evidence.flight_dump import of_groups


def status(*counts: tuple[int, int], text: bool = False) -> dict[str, Any]:
    """By pg_id; JSON writes numbers as text."""
    return {
        str(number): {
            "last_enqueued_collective": str(issued) if text else issued,
            "last_started_collective": -1,
            "last_completed_collective": str(completed) if text else completed,
        }
        for number, (issued, completed) in enumerate(counts)
    }


@pytest.mark.parametrize("text", [False, True])
def test_numbers_of_pickle_and_json_are_equal(text: bool) -> None:
    assert of_groups(status((7, 5), text=text), {"0": 0}, ["0"]) == {"0": (7, 5)}
    assert of_groups(status((-1, -1), text=text), {"0": 0}, ["0"]) == {"0": (0, 0)}


def test_groups_without_entries_follow_the_order_of_their_names() -> None:
    told = status((1, 1), (2, 2), (3, 3))
    expected = {"0": (1, 1), "4": (2, 2), "12": (3, 3)}
    assert of_groups(told, {}, ["12", "0", "4"]) == expected
    assert of_groups(told, {"12": 2}, ["12", "0", "4"]) == expected
    # More groups than are counted: their numbers are their places.
    assert of_groups(status((1, 1), (2, 2)), {}, ["0", "4", "12"]) == {"0": (1, 1), "4": (2, 2)}


def test_names_that_contradict_the_order_are_not_guessed() -> None:
    told = status((1, 1), (2, 2), (3, 3))
    assert of_groups(told, {"12": 0}, ["12", "0", "4"]) == {"12": (1, 1)}
    assert of_groups(told, {"mesh_tp": 1}, ["mesh_tp", "mesh_dp", "0"]) == {"mesh_tp": (2, 2)}
    # The only one that is left.
    found = of_groups(status((1, 1), (2, 2)), {"mesh_tp": 1}, ["mesh_tp", "mesh_dp"])
    assert found == {"mesh_tp": (2, 2), "mesh_dp": (1, 1)}


@pytest.mark.parametrize("name", ["9" * 5000, "²"])
def test_names_that_are_no_numbers_of_groups_are_not_ordered(name: str) -> None:
    assert of_groups(status((1, 1), (2, 2)), {"0": 0}, ["0", name, "4"]) == {"0": (1, 1)}


@pytest.mark.parametrize("raw", [None, [], {"0": 3}, {"x": {}}, {"0": {"last_enqueued": 3}}])
def test_anything_else_tells_nothing(raw: Any) -> None:
    assert of_groups(raw, {"0": 0}, ["0"]) == {}
