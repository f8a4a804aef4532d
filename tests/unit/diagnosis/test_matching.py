"""Calls at one position: whether they match, and the first difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.matching import differs, mismatched_pairs, view, wire_numel
from moediag.diagnosis.words import cause
from moediag.evidence.model import Collective, Group

ORDER = (0, 1)


def call(op: str, numel_in: int = 8, numel_out: int = 8, **more: Any) -> Collective:
    return Collective(0, "0", 0, op, numel_in, numel_out, more.pop("dtype", "float32"), **more)


def meet(one: Collective, **changes: Any) -> str | None:
    return differs({0: one, 1: replace(one, **changes)}, ORDER)


@pytest.mark.parametrize(
    ("op", "elements"),
    [
        ("all_reduce", 8), ("broadcast", 8), ("send", 8), ("reduce_scatter", 8), ("reduce", 8),
        ("gather", 8), ("all_gather", 16), ("recv", 16), ("scatter", 16),
    ],
)  # fmt: skip
def test_wire_numel_counts_the_whole_tensor(op: str, elements: int) -> None:
    assert wire_numel(call(op, 8, 16)) == elements
    # If only the other side is known, it is used.
    assert wire_numel(call(op, 0, 16)) == 16
    assert wire_numel(call(op, 8, 0)) == 8


@pytest.mark.parametrize(
    ("one", "changes", "kind"),
    [
        (call("all_reduce"), {}, None),
        (call("all_reduce"), {"op": "all_gather"}, "op"),
        (call("all_reduce"), {"numel_in": 9}, "size"),
        (call("all_reduce"), {"dtype": "bfloat16"}, "dtype"),
        (call("all_reduce"), {"dtype": ""}, None),
        (call("all_reduce", reduce="sum"), {"reduce": "avg"}, "reduce"),
        (call("all_reduce", reduce="sum"), {"reduce": None}, None),
        (call("broadcast", peer=0), {"peer": 1}, "root"),
        (call("reduce", peer=0), {"peer": 1}, "root"),
        (call("gather", peer=0), {"peer": 1}, "root"),
        (call("scatter", peer=0), {"peer": 1}, "root"),
        (call("broadcast", peer=0), {"peer": None}, None),
        (call("all_reduce", peer=0), {"peer": 1}, None),
        (call("all_reduce", parameters=("a",)), {"parameters": ("b",)}, "parameters"),
        (call("all_reduce", parameters=("a",)), {"parameters": None}, None),
        (call("all_reduce", parameters=("a",)), {"parameters": ()}, "parameters"),
        # Size and dtype of a barrier are ignored.
        (call("barrier"), {"numel_in": 0, "dtype": "int64"}, None),
        # The first kind of difference is reported.
        (call("all_reduce"), {"numel_in": 9, "dtype": "bfloat16"}, "size"),
        (call("all_reduce", reduce="sum"), {"reduce": "avg", "dtype": "int64"}, "dtype"),
    ],
)
def test_first_difference_is_reported(
    one: Collective, changes: dict[str, Any], kind: str | None
) -> None:
    assert meet(one, **changes) == kind


@pytest.mark.parametrize(
    ("op", "parts", "whole", "kind"),
    [
        ("all_gather", (4, 4), 8, None),
        ("all_gather", (3, 5), 8, None),  # uneven, and they add up
        ("all_gather", (4, 5), 8, "size"),
        ("reduce_scatter", (4, 4), 8, None),
        ("reduce_scatter", (3, 5), 8, None),
        ("reduce_scatter", (4, 5), 8, "size"),
        ("all_reduce", (8, 8), 8, None),
    ],
)
def test_parts_must_be_equal_or_add_up_to_the_whole(
    op: str, parts: tuple[int, int], whole: int, kind: str | None
) -> None:
    sides = {
        rank: call(op, part, whole) if op == "all_gather" else call(op, whole, part)
        for rank, part in enumerate(parts)
    }
    assert differs(sides, ORDER) == kind


def exchange(sent: Any, wanted: Any, rows: int = 1) -> Collective:
    """An all-to-all of two ranks with these splits; None: equal parts of 8 elements."""
    numel_in = 8 if sent is None else rows * sum(sent)
    numel_out = 8 if wanted is None else rows * sum(wanted)
    return call("all_to_all", numel_in, numel_out, splits_in=sent, splits_out=wanted)


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        (exchange((1, 2), (1, 3)), exchange((3, 4), (2, 4)), []),
        (exchange((1, 2), (1, 3)), exchange((3, 4), (5, 4)), [(0, 1)]),
        (exchange((1, 2), (1, 9)), exchange((3, 4), (2, 4)), [(1, 0)]),
        (exchange((1, 2), (7, 3)), exchange((3, 4), (2, 4)), [(0, 0)]),
        (exchange(None, None), exchange(None, None), []),
        (exchange(None, None), exchange((4, 4), (4, 4)), []),
        (exchange(None, None), exchange((3, 5), (3, 5)), [(0, 1), (1, 0)]),
        # Splits count rows on one side and elements on the other.
        (exchange((1, 2), (1, 3), 10), exchange((30, 40), (20, 40)), []),
        # Nothing is sent or expected.
        (exchange((0, 0), (0, 0)), exchange((0, 0), (0, 0)), []),
        (exchange((0, 0), (0, 1)), exchange((0, 0), (0, 0)), [(1, 0)]),
        # Splits for another number of ranks are ignored.
        (exchange((1, 2, 3), (1, 3)), exchange((3, 4), (5, 4)), []),
    ],
)
def test_mismatched_pairs_are_found(
    one: Collective, other: Collective, pairs: list[tuple[int, int]]
) -> None:
    assert mismatched_pairs({0: one, 1: other}, ORDER) == pairs
    assert differs({0: one, 1: other}, ORDER) == ("splits" if pairs else None)


def test_pairs_follow_the_group_order() -> None:
    one, other = exchange((1, 2), (1, 3)), exchange((3, 4), (5, 4))
    assert mismatched_pairs({7: one, 4: other}, (7, 4)) == [(7, 4)]
    # An unknown rank is in no pair.
    assert mismatched_pairs({7: one}, (7, 4)) == []
    assert mismatched_pairs({}, ORDER) == []
    assert mismatched_pairs({0: one, 1: call("all_reduce")}, ORDER) == []


def test_indivisible_sizes_are_not_compared() -> None:
    odd = call("all_to_all", 9, 9)
    assert mismatched_pairs({0: odd, 1: exchange((3, 5), (3, 5))}, ORDER) == []
    broken = call("all_to_all", 8, 8, splits_in=(1, 2), splits_out=(1, 2))
    assert mismatched_pairs({0: broken, 1: exchange((3, 5), (3, 5))}, ORDER) == []


@pytest.mark.parametrize(("expected", "kind"), [(12, None), (13, "splits")])
def test_totals_are_compared_when_parts_are_unknown(expected: int, kind: str | None) -> None:
    one = call("all_to_all", 4, 6, parts_unknown=True)
    other = call("all_to_all", 8, expected - 6, parts_unknown=True)
    assert differs({0: one, 1: other}, ORDER) == kind
    # A rank without evidence may have sent the rest.
    assert differs({0: one, 1: other}, (0, 1, 2)) is None


def test_unknown_kind_compares_the_whole_call() -> None:
    one = call("all_reduce", parameters=("a",))
    assert view("size")(one) == 8
    assert view("size")(call("all_to_all")) is None
    assert view("whatever")(one) == view("whatever")(replace(one, position=5))
    assert view("whatever")(one) != view("whatever")(replace(one, splits_in=(1,)))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            (256, 384),
            "Rank 0 sends 256 elements in all, rank 1 384: equal splits need equal totals on ep.",
        ),
        ((8, 8), "Rank 0 sends rank 1 an equal share"),  # the difference is elsewhere
    ],
)
@pytest.mark.parametrize("splits", [None, ()])  # both: none were passed
def test_equal_splits_with_unequal_totals_say_so(
    sizes: tuple[int, int], said: str, splits: tuple[int, ...] | None
) -> None:
    calls = {
        r: call("all_to_all", n, n, splits_in=splits, splits_out=splits)
        for r, n in enumerate(sizes)
    }
    found = Divergence("splits", Group("0", ORDER, desc="ep"), 0, calls, pairs=((0, 1),))
    assert said in cause.of_divergence(found, Blame(), "gloo", died=False)
