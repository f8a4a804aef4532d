"""The peak that `moediag check` tells against what torch counts on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import check_memory
from bench.check_memory import NEAR, Case
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]
CASES: tuple[Case, ...] = (
    ("experts", "bfloat16", "none", {"dp_shard": 2}, {}),
    ("two kinds of layers", "float32", "layers", {"dp_shard": 2}, {}),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_within_five_percent(case: Case, tmp_path: Path) -> None:
    need(check_memory.RELEASE)
    found = check_memory.measure(case, tmp_path)
    assert found.problem == "" and abs(found.difference) <= NEAR, found
