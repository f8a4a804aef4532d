"""`make accuracy` with real tools and a real job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import jobs
from bench.accuracy import page, simulated
from bench.accuracy.counting import Outcome
from bench.accuracy.frtrace import TorchFrTrace

pytestmark = [pytest.mark.e2e, pytest.mark.wide]
ROOT = Path(__file__).parents[2]


def test_torchfrtrace_and_moediag_read_the_same_dumps(tmp_path: Path) -> None:
    """Compares both tools where one of three ranks makes a different call, and on a healthy job."""
    spec = (jobs.Layout(dp=3), 2, 2)
    timed = jobs.DIMENSIONS[0]
    cases = [simulated.Case(timed, spec, *what) for what in (("op", 12), ("none", 0))]
    with TorchFrTrace() as tool:
        judged = [
            simulated.judged(case, folder, tool, tmp_path)
            for case in cases
            if (folder := case.folder())
        ]
    wrong, quiet = judged
    assert wrong.outcome(page.MOEDIAG) is Outcome.RIGHT
    assert quiet.outcome(page.MOEDIAG) is quiet.outcome(page.FRTRACE) is Outcome.QUIET
    theirs = wrong.answers[page.FRTRACE]
    assert not theirs.refused and theirs.alarm and "TYPE_MISMATCH" in theirs.text
    assert theirs.among and ".py:" in theirs.text


def test_the_command_counts_a_victim_with_every_tool(tmp_path: Path) -> None:
    report = tmp_path / "accuracy.md"
    done = subprocess.run(
        [sys.executable, "-m", "bench.accuracy", "--no-simulated", "--victim", "raises",
         "--out", str(report)],
        cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=300, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    text = report.read_text()
    assert "strict true" in done.stdout  # the column title wraps
    assert "| victims | moediag | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 0 |" in text
    assert "| victims | DETAIL | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 0 |" in text
