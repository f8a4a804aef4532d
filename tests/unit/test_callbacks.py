"""Callbacks and sinks: what they tell of a healthy training and of a broken one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moediag.callbacks import job_laws, sinks  # noqa: E402
from moediag.callbacks.job_laws import JobLaws  # noqa: E402
from moediag.callbacks.sinks import JsonLines  # noqa: E402
from moediag.errors import EvidenceError  # noqa: E402
from moediag.protocol import ENV_WATCH  # noqa: E402
from tests.unit.test_laws import train  # noqa: E402
from tests.unit.trial_results import trial_result  # noqa: E402

BLOCK, COUNTS = "layers.0.mlp", {0: [3, 0], 1: [4, 1]}
BROKEN = trial_result(verdict="nonfinite", cause="it is nan", notes=("one note",), culprits=(1,))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("bad_step", "verdict"), [(0, "clean"), (2, "nonfinite")])
def test_the_end_of_a_training_reports_its_laws(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad_step: int, verdict: str
) -> None:
    caplog.set_level(logging.INFO, "moediag")
    job = JobLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    job.begin()
    job.begin()  # a Trainer calls twice
    train(bad_step)
    job.end()
    (line,) = lines(tmp_path / "found.jsonl")
    assert (line["kind"], line["verdict"]) == ("finding", verdict)
    levels = {r.levelname for r in caplog.records if r.message.startswith(f"{verdict}: ")}
    assert levels == {"WARNING" if bad_step else "INFO"}
    assert f"moediag diagnose {tmp_path / 'run'}" in caplog.text


def test_a_training_that_raised_is_a_crash(tmp_path: Path) -> None:
    job = JobLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    job.begin()
    job.end(ValueError("no data"))
    job.end()
    (line,) = lines(tmp_path / "found.jsonl")
    assert line["verdict"] == "crash"
    assert "no data" in line["cause"]


def test_under_watch_nothing_is_recorded_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_WATCH, "elsewhere")
    job = JobLaws(str(tmp_path / "run"), sinks=[JsonLines(tmp_path / "found.jsonl")])
    job.begin()
    job.end()
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_does_not_fail_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise EvidenceError("no record")

    monkeypatch.setattr(job_laws, "send", fails)
    job = JobLaws(str(tmp_path))
    job.begin()
    job.end()
    assert "could not be diagnosed" in caplog.text


def test_sinks_refuse_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError):
        sinks.send(tmp_path, [])


def test_json_lines_have_each_rank_and_expert(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "found.jsonl")
    sink.tokens(2, BLOCK, COUNTS)
    sink.finding(BROKEN)
    first, last = lines(tmp_path / "found.jsonl")
    assert first == {
        "kind": "tokens", "step": 2, "block": BLOCK, "counts": {"0": [3, 0], "1": [4, 1]},
    }  # fmt: skip
    assert (last["verdict"], last["culprits"], last["notes"]) == ("nonfinite", [1], ["one note"])
