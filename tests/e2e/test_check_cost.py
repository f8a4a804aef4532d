"""The cost that `moediag check` tells against what real gloo ranks do and hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import check_cost
from bench.check_cost import LAYOUTS, Number, Row
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]


@pytest.mark.parametrize("at", range(len(LAYOUTS)), ids=lambda at: str(LAYOUTS[at][:2]))
def test_what_is_told_is_within_two_percent(at: int, tmp_path: Path) -> None:
    need(check_cost.RELEASE)
    row = check_cost.measure(*LAYOUTS[at], tmp_path)
    assert row.problem == "" and row.numbers
    assert row.wrong == []


def test_a_number_that_is_wrong_is_named() -> None:
    row = Row("fsdp2", {"dp_shard": 2}, (Number("a", 99, 100), Number("b", 97, 100)))
    assert [number.name for number in row.wrong] == ["b"]
    assert Number("not told", 0, 4).difference == 1.0
    assert Number("not real", 4, 0).difference == float("inf")
