"""`moediag.laws` in a program of one rank, and what `moediag diagnose` makes of its record."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import moediag.laws  # noqa: E402
from moediag.pipeline.examine import examine  # noqa: E402
from moediag.protocol import ENV_WATCH  # noqa: E402
from moediag.result import TrialResult  # noqa: E402


def train(bad_step: int = 0) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = net(torch.ones(1, 4)).sum()
        (loss * float("nan") if step == bad_step else loss).backward()
        optimizer.step()


def page(folder: Path) -> TrialResult:
    (trial,) = examine([folder]).result.trials
    return trial


def test_a_healthy_program_is_clean(tmp_path: Path) -> None:
    with moediag.laws.recording(str(tmp_path)):
        train()
    trial = page(tmp_path)
    assert trial.verdict == "clean"
    assert trial.diagnosis.cause.startswith("No hang, no crash")
    assert (tmp_path / "rank-0.laws.jsonl").exists()


def test_a_broken_law_is_found(tmp_path: Path) -> None:
    moediag.laws.record(str(tmp_path), every=1)
    train(bad_step=2)
    moediag.laws.finish()
    trial = page(tmp_path)
    assert trial.verdict == "nonfinite"
    assert "in step 2 they were finite" in trial.diagnosis.cause
    assert "test_laws.py:" in trial.diagnosis.cause


def test_an_exception_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data"), moediag.laws.recording(str(tmp_path)):
        raise ValueError("no data")
    trial = page(tmp_path)
    assert trial.verdict == "crash"
    assert "no data" in trial.diagnosis.cause


def test_under_watch_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_WATCH, "elsewhere")
    with moediag.laws.recording(str(tmp_path)):
        train()
    assert list(tmp_path.iterdir()) == []
