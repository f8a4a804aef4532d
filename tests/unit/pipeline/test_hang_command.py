"""The command of --on-hang: output, time limit, and no process left."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.launch.processes import read_stat
from moediag.pipeline import watch
from moediag.pipeline.hang_command import LOG, HangCommand
from moediag.pipeline.watch import WatchOptions
from moediag.result import Confidence, Diagnosis, TrialResult, Verdict

LEAVES_A_CHILD = "sleep 300 & echo $!"
FOUND = Diagnosis(Verdict.HANG, "hang", Confidence.HIGH)
RESULT = TrialResult("watched", "unfixed", {}, "", "gloo", 2, FOUND, "", True)


def run(folder: Path, command: str, seconds: float = 30.0) -> HangCommand:
    return HangCommand(command, dict(os.environ, MOEDIAG_VERDICT="hang"), folder, seconds)


def test_output_is_written_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = run(tmp_path, "echo $MOEDIAG_VERDICT; echo wrong >&2; exit 3")
    said = command.finish(wait=True)
    assert said.startswith("the --on-hang command: exit code 3 after ")
    assert said.endswith(f"; its output is in {tmp_path.name}/{LOG}")
    assert (tmp_path / LOG).read_text() == "hang\nwrong\n"
    assert capfd.readouterr() == ("", "")


def test_standard_input_is_empty(tmp_path: Path) -> None:
    assert "exit code 0" in run(tmp_path, "cat").finish(wait=True)


def test_the_command_runs_in_the_background_and_ends_with_the_job(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = run(tmp_path, "sleep 300")
    assert time.monotonic() - begun < 5.0
    said = command.finish(wait=False)
    assert "moediag ended it with the job" in said


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    said = run(tmp_path, "echo begun; sleep 300; echo ended", seconds=0.5).finish(wait=True)
    assert "moediag ended it after 0 s" in said or "moediag ended it after 1 s" in said
    assert "ended" not in (tmp_path / LOG).read_text()


def test_a_signal_is_reported(tmp_path: Path) -> None:
    assert "ended by signal 9" in run(tmp_path, "kill -9 $$").finish(wait=True)


def test_its_process_group_is_ended(tmp_path: Path) -> None:
    said = run(tmp_path, LEAVES_A_CHILD).finish(wait=True)
    assert "exit code 0" in said
    child = read_stat(int((tmp_path / LOG).read_text()))
    assert child is None or not child.alive


def test_the_result_contains_how_the_command_ended(tmp_path: Path) -> None:
    watching = watch._Watch(["true"], "job", tmp_path, WatchOptions(), lambda *_: None, None)
    again = tmp_path / "attempt-1"
    again.mkdir()
    watching.commands = [run(again, "exit 4")]
    watching.attempts.results = [replace(RESULT, evidence=f"attempt-{n}") for n in (0, 1)]
    (said,) = watching._commands_ended(wait=True)
    assert [found.notes for found in watching.attempts.results] == [(), (said,)]
    assert "exit code 4" in said


def test_nothing_is_reported_without_a_command(tmp_path: Path) -> None:
    watching = watch._Watch(["true"], "job", tmp_path, WatchOptions(), lambda *_: None, None)
    watching.attempts.results = [RESULT]
    assert watching._commands_ended(wait=True) == () and watching.attempts.results == [RESULT]
