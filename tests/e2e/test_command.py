"""`moediag run` as a program: streams, exit codes, folders, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.marked import MARK, eventually, gone, marked
from tests.e2e.pipeline import need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


def start(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    need({"transformers": "4.53.2"})
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "moediag", "run", *arguments],
        cwd=folder, env={**os.environ, MARK: mark}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return process, mark


@pytest.mark.wide
def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    process, mark = start(tmp_path, "expert-starvation-silent", "--cpu", "2", "--json")
    out, progress = process.communicate(timeout=300)
    assert process.returncode == 0, progress
    result = json.loads(out)
    assert problems(result) == []
    (folder,) = (tmp_path / "moediag-runs").iterdir()
    assert folder.name.endswith("-expert-starvation-silent")
    assert json.loads((folder / "result.json").read_text()) == result
    verdicts = {trial["variant"]: trial["verdict"] for trial in result["trials"]}
    assert verdicts["unfixed"] == "wrong-gradients"
    assert all((folder / trial["evidence"] / "trial.json").exists() for trial in result["trials"])
    for variant, verdict in verdicts.items():
        assert f"{variant}: {verdict}" in progress
    assert marked(mark) == []


def in_its_hang(folder: Path) -> Callable[[], bool]:
    """True once both ranks of the unfixed trial have begun a step."""
    logs = [folder / "out" / "unfixed" / f"rank-{rank}.events.jsonl" for rank in (0, 1)]
    return lambda: all(log.exists() and '"collective"' in log.read_text() for log in logs)


def test_ctrl_c_stops_the_ranks_and_keeps_the_evidence(tmp_path: Path) -> None:
    process, mark = start(
        tmp_path, "expert-starvation-hang", "--quiescence", "300", "--out", "out", "--json"
    )
    try:
        eventually(in_its_hang(tmp_path), "the ranks did not start")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "interrupted after 0 of 5 trials" in errors
    gone(mark)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert problems(result) == []
    assert (result["trials"], result["conclusion"]["reproduced"]) == ([], None)
    launch = json.loads((tmp_path / "out" / "unfixed" / "launch.json").read_text())
    assert launch["interrupted"] is True
    # The evidence of the interrupted trial is read like any other.
    again = subprocess.run(
        [sys.executable, "-m", "moediag", "diagnose", str(tmp_path / "out" / "unfixed"), "--json"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert again.returncode in (1, 3), again.stderr
    assert json.loads(again.stdout)["trials"][0]["variant"] == "unfixed"


@pytest.mark.wide
def test_a_killed_moediag_leaves_no_ranks(tmp_path: Path) -> None:
    process, mark = start(
        tmp_path, "expert-starvation-hang", "--quiescence", "300", "--out", "out", "--json"
    )
    try:
        eventually(in_its_hang(tmp_path), "the ranks did not start")
        assert len(marked(mark)) > 3
    finally:
        process.kill()
        process.communicate()
    gone(mark)
    assert not (tmp_path / "out" / "result.json").exists()
