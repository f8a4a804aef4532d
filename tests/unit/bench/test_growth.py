"""The tables of growth: whole commands are replaced, the search is real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import growth


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Replaces the commands; returns what was asked of them."""
    told: list[Sequence[str]] = []

    def moediag(*words: str) -> tuple[float, Any]:
        told.append(words)
        trial = {"seconds": {"total": 0.5}, "parameters_compared": 69}
        return 12.0, {"trials": [trial], "cells": [{}] * 24}

    monkeypatch.setattr(growth, "moediag", moediag)
    return told


def test_trials_grow_by_ranks_and_by_parameters(asked: list[Sequence[str]], tmp_path: Path) -> None:
    assert "| 16 | 0.50 |" in growth.table(growth.by_ranks(tmp_path))
    assert [words[words.index("--cpu") + 1] for words in asked] == ["2", "4", "8", "16"]
    asked.clear()
    assert "| 32 | 32 | 69 | 0.50 |" in growth.table(growth.by_parameters(tmp_path))
    assert "model.layers=32" in asked[2]
    assert len({words[-1] for words in asked}) == len(asked), "each has a run directory of its own"


def test_hunts_grow_by_families(asked: list[Sequence[str]], tmp_path: Path) -> None:
    assert "| 4 | 24 | 12 | 0.50 |" in growth.table(growth.by_families(tmp_path))
    assert "qwen3_moe,mixtral" in asked[1]


def test_no_bisect_needs_more_probes_than_halving_and_checks() -> None:
    head, *rows = growth.by_releases()
    assert head[0] == "releases"
    for _, least, _, most in rows:
        assert int(str(most)) <= int(str(least))
