"""The GPU suite without a GPU: its rows, its report, its refusal."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu as suite
from moediag import hardware
from moediag.errors import ExitCode, StackError
from moediag.lab import machine_checks
from moediag.lab.campaign.sweep import shared_runs
from moediag.lab.scenario import catalogue
from moediag.lab.stacks import interpreter
from moediag.result import RunResult, devices, read_result
from tests.unit.trial_results import changed

ROOT = Path(__file__).parent.parent.parent.parent
GOLDEN = read_result(ROOT / "tests" / "golden" / "results" / "hang.json")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        machine_checks, "gpus", lambda: [machine_checks.Gpu("NVIDIA H200", "1", "580.1")]
    )
    monkeypatch.setattr(hardware, "gpus", machine_checks.gpus)
    monkeypatch.setattr(hardware, "nccl", lambda: "2.28.9")
    monkeypatch.setattr(interpreter, "identity", lambda: dict(IDENTITY))


IDENTITY = {**interpreter.identity(), "torch": "2.11.0+cu130"}


def test_every_row_names_a_scenario_and_fits_the_machine() -> None:
    alone = list(suite.questions(1, "2.28.9"))
    assert {q.scenario for q in alone} <= set(catalogue.names())
    assert {q.device for q in alone} == {devices.SHARED}
    assert {q.ranks for q in alone if q.scenario == "expert-starvation"} == {2, 4}
    assert "moediag run expert-starvation --gpus 2 --share-gpu" in {q.command for q in alone}
    many = list(suite.questions(8, "2.30.1"))
    assert {q.device for q in many} == {"gpu", devices.SHARED_NCCL}
    assert "moediag run ep-overwrite --gpus 4" in {q.command for q in many}


def test_exit_code_is_4_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_checks, "gpus", list)
    monkeypatch.setattr(machine_checks, "driver_gpus", list)
    assert suite.main(["--out", str(tmp_path / "reports")]) == ExitCode.CANNOT_RUN_HERE
    assert "1 GPU requested, 0 found" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


@pytest.mark.skipif(bool(hardware.gpus() or hardware.driver_gpus()), reason="it would measure")
def test_make_gpu_exits_with_4_without_a_gpu() -> None:
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode != 0
    assert "Error 4" in done.stderr
    assert "0 found" in done.stderr + done.stdout


def test_measured_and_missing_rows_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_gpu: None
) -> None:
    asked: list[tuple[str, int, bool]] = []

    def run(plan: Any, *_: object) -> RunResult:
        trial = plan.trials[0].trial
        asked.append((plan.scenario.name, trial.world_size, trial.shared_gpu))
        if plan.scenario.name == "ep-overwrite":
            raise StackError("transformers 5.12.1 is wanted and 5.17.0 is installed")
        trials = tuple(dataclasses.replace(t, shared_gpu=True) for t in GOLDEN.trials)
        return dataclasses.replace(GOLDEN, scenario=plan.scenario.name, trials=trials)

    monkeypatch.setattr("moediag.lab.campaign.run.run", run)
    line = ["--scenario", "expert-starvation-hang", "--scenario", "ep-overwrite"]
    assert suite.main([*line, "--out", str(tmp_path), "--evidence", str(tmp_path / "e")]) == 0
    assert asked == [("expert-starvation-hang", 2, True), ("expert-starvation-hang", 4, True),
                     ("ep-overwrite", 2, True)]  # fmt: skip
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-1x-nvidia-h200.json")
    raw = json.loads(path.read_text())
    assert [len(r["trials"]) for r in raw["rows"]] == [len(GOLDEN.trials)] * 2 + [0]
    assert raw["versions"]["torch"] == "2.11.0+cu130" and raw["versions"]["nccl"] == "2.28.9"
    text = path.with_suffix(".md").read_text()
    assert "## `moediag run expert-starvation-hang --gpus 4 --share-gpu`" in text
    assert "gloo on a shared GPU" in text
    last = text.splitlines()[-1]
    assert "ep-overwrite" in last and "5.12.1 is wanted and 5.17.0 is installed" in last


def test_a_row_of_trials_without_a_verdict_counts_as_not_measured() -> None:
    trials = tuple(
        changed(t, verdict="inconclusive", cause="no environment") for t in GOLDEN.trials
    )
    result = dataclasses.replace(GOLDEN, trials=trials)
    one = suite.row(
        suite.Question("expert-starvation-hang", 2, devices.SHARED),
        shared_runs.Ran(result, 3, "", 1.0),
    )
    assert not one.measured
    report = suite.Report("2026-01-01", "0", {"gpus": ["X"], "driver": "1"}, {}, (one,))
    assert "| no environment |" in suite.page(report)
    assert report.name == "2026-01-01-1x-x"


def test_the_report_includes_the_step_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_gpu: None
) -> None:
    def measure(run: suite.speed.Run, timeout: float) -> suite.speed.Measured:
        return suite.speed.Measured(run, {}, "it took more than 600 s")

    monkeypatch.setattr(suite.speed, "measure", measure)
    assert suite.main(["--speed", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())
    assert raw["rows"] == []
    assert [run["size"] for run in raw["speed"]].count("large") == 2
    assert all(row["reason"] for run in raw["speed"] for row in run["rows"])
    assert "### Speed not measured" in path.with_suffix(".md").read_text()
