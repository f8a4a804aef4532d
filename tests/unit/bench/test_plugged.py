"""How planted faults are judged."""

from __future__ import annotations

import re

import pytest

from bench.plugged.__main__ import PLANTED, _judged

LINES = PLANTED["planted"].read_text(encoding="utf-8").splitlines()
AT = {
    name: next(n for n, line in enumerate(LINES, 1) if n > at and "# PLANTED" in line)
    for at, line in enumerate(LINES, 1)
    for name in re.findall(r"^def (test_bad_\w+)", line)
}


@pytest.mark.parametrize(
    ("name", "outcome", "first", "judged"),
    [
        ("test_ok_gather", "passed", "", "healthy, passed"),
        ("test_ok_gather", "failed", "rank 0: hang", "FALSE ALARM"),
        ("test_bad_exit", "passed", "", "missed"),
        ("test_bad_exit", "failed", "rank 1 at planted.py:{} f: crash", "right rank"),
        ("test_bad_exit", "failed", "rank 1: crash", "right rank, without the line"),
        ("test_bad_exit", "failed", "rank 0 at planted.py:{} f: crash", "WRONG RANK"),
        ("test_bad_exit", "failed", "ranks 0, 1 at planted.py:{} f: crash", "WRONG RANK"),
        ("test_bad_exit", "failed", "hang. At planted.py:{}", "nobody named"),
        ("test_bad_gather", "failed", "hang. At planted.py:{}", "rightly nobody"),
        (
            "test_bad_gather", "failed", "rank 0 at planted.py:{} f, rank 1 finished: hang.",
            "rightly nobody",
        ),
        ("test_bad_gather", "failed", "rank 0 at planted.py:{} f: hang", "WRONG RANK"),
    ],
)  # fmt: skip
def test_the_named_rank_and_line_are_compared(
    name: str, outcome: str, first: str, judged: str
) -> None:
    text = first.format(AT.get(name, 0))
    assert _judged(name, outcome, text, text, LINES) == judged
