"""A few hundred damaged files and messages; ``python -m bench.endurance --hostile 100000`` reads
the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.endurance import hostile
from moediag.errors import MoediagError


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_damaged_files_never_crash_run_code_or_reach_a_page_unescaped(kind: str) -> None:
    ((_, report),) = hostile.run(16, seed=1000, kinds=[kind])
    assert report.failures == []
    assert report.count == 16


def broken(_: Path) -> None:
    raise AttributeError("x")


def killed(_: Path) -> None:
    os.abort()


def runs(_: Path) -> None:
    os.environ[hostile.CANARY] = "ran"
    raise MoediagError("refused, but too late")


def endless(_: Path) -> None:
    while True:
        pass


def greedy(_: Path) -> None:
    bytearray(4 * hostile.MEMORY)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (broken, "AttributeError: x"), (killed, "ended by -6"), (runs, "code ran"),
        (endless, "more than 0.2 s"), (greedy, "MemoryError: "),
    ],
)  # fmt: skip
def test_what_is_looked_for_is_found(
    read: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "SECONDS", 0.2)
    monkeypatch.setitem(hostile.KINDS, "x", hostile.Kind(lambda: [{"a": b"1"}], read, 100))  # type: ignore[arg-type]
    ((_, report),) = hostile.run(1, kinds=["x"])
    assert report.failures == [("x", 0, said)]
