"""Callbacks and sinks: what they tell of a healthy training and of a broken one."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
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


def test_a_second_training_is_reported_too(tmp_path: Path) -> None:
    job = JobLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    for bad_step in (2, 0):
        job.begin()
        train(bad_step)
        job.end()
    assert [line["verdict"] for line in lines(tmp_path / "found.jsonl")] == ["nonfinite", "clean"]
    assert list((tmp_path / "run").glob("earlier-*/rank-0.laws.jsonl"))


def test_a_prepared_training_gives_way_to_one_that_begins(tmp_path: Path) -> None:
    evaluator, trainer = torch.nn.Identity(), torch.nn.Identity()  # stand-ins
    only_evaluates = JobLaws(str(tmp_path / "first"))
    only_evaluates.begin(evaluator)
    job = JobLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    job.begin(trainer)
    job.begin()
    train(2)
    job.end()
    assert [line["verdict"] for line in lines(tmp_path / "found.jsonl")] == ["nonfinite"]


def test_the_second_callback_of_a_trainer_warns_once_and_leaves_the_first_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = torch.nn.Identity()
    first = JobLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    second = JobLaws(str(tmp_path / "second"))
    for job in (first, second):
        job.begin(trainer)
    for job in (first, second):
        job.begin()
    train(2)
    for job in (first, second):
        job.end()
    assert [line["verdict"] for line in lines(tmp_path / "found.jsonl")] == ["nonfinite"]
    assert caplog.text.count("are not checked") == 1
    assert not (tmp_path / "second").exists()
    assert not list((tmp_path / "run").glob("earlier-*"))


def test_a_training_inside_another_says_that_it_is_not_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outer, inner = JobLaws(str(tmp_path / "outer")), JobLaws(str(tmp_path / "inner"))
    outer.begin()
    inner.begin()
    inner.end()
    assert f"is recorded in {tmp_path / 'outer'}" in caplog.text
    outer.end()
    assert not (tmp_path / "inner").exists()


def test_a_folder_that_another_process_records_into_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import sys; from moediag.recorder import fresh_folder as f\n"
    code += "held = f.claim(sys.argv[1], 0); print('held', flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        JobLaws(str(tmp_path)).begin()
        assert f"process {other.pid} records rank 0 into this folder" in caplog.text
        other.communicate(b"")
    caplog.clear()
    job = JobLaws(str(tmp_path))
    job.begin()
    job.end()
    assert "not checked: " not in caplog.text


def test_numbers_that_were_not_checked_are_no_information(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moediag")
    job = JobLaws(str(tmp_path))
    job.begin()
    job.end()
    (said,) = [r for r in caplog.records if r.message.startswith("clean: ")]
    assert said.levelname == "WARNING" and "numbers were not checked" in said.message


@pytest.mark.parametrize("told", [("the rate is twice as high",), ()])
def test_what_is_suspicious_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    told: tuple[str, ...],
) -> None:
    caplog.set_level(logging.INFO, "moediag")
    trial = trial_result(verdict="clean", cause="no law was broken", suspicious=told)
    monkeypatch.setattr(job_laws, "send", lambda *_: trial)
    job = JobLaws(str(tmp_path))
    job.begin()
    job.end()
    levels = {r.levelname for r in caplog.records if "no law was broken" in r.message}
    assert levels == {"WARNING" if told else "INFO"}
    assert ("suspicious: the rate is twice as high" in caplog.text) == bool(told)


def test_every_sink_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def tokens(self, *_: object) -> None: ...

        def finding(self, trial: object) -> None:
            raise OSError("no such dashboard")

    caplog.set_level(logging.INFO, "moediag")
    job = JobLaws(str(tmp_path / "run"), 1, [Fails(), JsonLines(tmp_path / "found.jsonl")])
    job.begin()
    train()
    job.end()
    assert [line["verdict"] for line in lines(tmp_path / "found.jsonl")] == ["clean"]
    told = [record.levelname for record in caplog.records]
    assert told.index("INFO") < told.index("ERROR") and "no such dashboard" in caplog.text


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


@pytest.mark.parametrize("told", [True, False])
def test_a_training_whose_modules_are_not_seen_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    """As under `torch.compile`: the callback knows the model."""
    job = JobLaws(str(tmp_path), 1)
    job.begin()
    weight = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    for step in range(4):
        loss = torch.nn.functional.linear(torch.ones(1, 4), weight.weight, weight.bias).sum()
        (loss * float("nan") if step == 1 else loss).backward()
        if told:
            job.backward(weight)
        optimizer.step()
    job.end()
    assert ("nonfinite: " in caplog.text) == told
    assert ("numbers were not checked" in caplog.text) == (not told)
