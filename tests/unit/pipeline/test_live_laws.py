"""A broken law is told once while the job runs, and only when all ranks have recorded it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moediag.pipeline import live_laws
from moediag.pipeline.live_laws import LiveLaws
from moediag.protocol import laws_file

PIECES = {
    "e": "pieces", "id": 0, "optimizer": "SGD", "key": "k.0", "names": ["a"], "parts": [""],
    "hows": ["reduced"], "in_set": [0], "in_group": [0], "sets": [[0, 1]],
}  # fmt: skip


def append(folder: Path, rank: int, step: int, value: str, **more: object) -> None:
    event = {
        "e": "check", "pieces": 0, "step": step, "count": step - 1, "clocks": [step],
        "params": [value], "grads": ["1"], "state": {}, "hyper": [{"lr": "0.1"}], **more,
    }  # fmt: skip
    path = folder / laws_file(rank)
    lines = [] if path.exists() else [PIECES]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (*lines, event))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(live_laws, "_PERIOD", 0.0)
    monkeypatch.setattr(live_laws, "_SHARE", 0.0)
    return []


def test_a_difference_is_told_once(tmp_path: Path, told: list[str]) -> None:
    laws = LiveLaws(told.append)
    laws.look(tmp_path)  # no rank has recorded anything
    append(tmp_path, 0, 1, "ab")
    laws.look(tmp_path)  # rank 1 is late
    append(tmp_path, 1, 1, "cd")
    append(tmp_path, 0, 2, "ab")
    laws.look(tmp_path)
    append(tmp_path, 0, 3, "ab")
    append(tmp_path, 1, 2, "cd")
    laws.look(tmp_path)
    assert len(told) == 1
    assert "ranks 0, 1 differ" in told[0]


def test_equal_replicas_are_not_told(tmp_path: Path, told: list[str]) -> None:
    laws = LiveLaws(told.append)
    for step in (1, 2, 3):
        append(tmp_path, 0, step, f"{step}")
        append(tmp_path, 1, step, f"{step}")
        laws.look(tmp_path)
    assert not told


def test_what_later_steps_may_take_back_is_not_told(tmp_path: Path, told: list[str]) -> None:
    laws = LiveLaws(told.append)
    append(tmp_path, 0, 1, "ab")
    append(tmp_path, 1, 1, "ab", hyper=[{"lr": "0.2"}])
    laws.look(tmp_path)
    assert not told


def test_a_file_of_no_rank_does_not_end_the_watcher(tmp_path: Path, told: list[str]) -> None:
    laws = LiveLaws(told.append)
    for step in (1, 2):
        append(tmp_path, 0, step, "ab")
        append(tmp_path, 1, step, "cd")
        (tmp_path / "rank-x.laws.jsonl").write_text("{}\n" * step)
        laws.look(tmp_path)
    assert len(told) == 1
