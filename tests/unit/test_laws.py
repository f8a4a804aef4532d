"""`moediag.laws` in a program of one rank, and what `moediag diagnose` makes of its record."""

from __future__ import annotations

import json
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


def test_files_of_an_earlier_run_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of this rank, and of ranks that this run does not have."""
    caplog.set_level("INFO", "moediag")
    for bad_step in (2, 0):
        with moediag.laws.recording(str(tmp_path)):
            train(bad_step)
        (tmp_path / "rank-3.events.jsonl").write_text("of a run with more ranks")
    assert page(tmp_path).verdict == "clean"
    (earlier,) = tmp_path.glob("earlier-*")
    assert f"an earlier run of rank 0 are in {earlier} now" in caplog.text
    assert {"rank-0.laws.jsonl", "rank-3.events.jsonl"} <= {p.name for p in earlier.iterdir()}
    (tmp_path / "rank-3.events.jsonl").unlink()
    assert page(tmp_path).verdict == "clean"


@pytest.mark.parametrize(("apart", "read"), [(3600.0, False), (5.0, True)])
def test_a_rank_that_ended_long_before_is_not_of_this_run(
    tmp_path: Path, apart: float, read: bool
) -> None:
    with moediag.laws.recording(str(tmp_path)):
        train()
    log = tmp_path / "rank-0.events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        event["t"] -= apart
    (tmp_path / "rank-1.events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    trial = json.loads((tmp_path / "trial.json").read_text())
    (tmp_path / "trial.json").write_text(json.dumps({**trial, "world_size": 2}))
    told = "rank 1: its record (it is of another run, or ended long before the newest began)"
    assert (told in page(tmp_path).diagnosis.not_seen) == (not read)
