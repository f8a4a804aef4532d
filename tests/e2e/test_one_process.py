"""`moediag watch --laws` on programs of one process, which never create a process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).parents[1] / "victims" / "one_process.py"
CASES = {  # program: verdict, what the page says
    "healthy": ("clean", "no law was broken in 6 checked steps. The only rank finished normally."),
    "scaler": ("clean", "no law was broken"),
    "never-clears": ("wrong-gradients", "before AdamW.step() at one_process.py:"),
    "stays-in-evaluation": ("wrong-gradients", "only in evaluation mode since step 6"),
    "scaler-clips": ("wrong-gradients", "still multiplied by the loss scale 65536"),
    "other-parameters": ("wrong-weights", "made from other parameters than those of the model"),
    "becomes-nan": ("nonfinite", "in step 3 they were finite"),
}


def watched(folder: Path, *options: str, name: str) -> tuple[int, dict[str, object]]:
    line = [sys.executable, "-m", "moediag", "watch", *options, "--out", str(folder), "--"]
    done = subprocess.run(
        [*line, sys.executable, str(PROGRAM), name], check=False, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    trials = json.loads((folder / "result.json").read_text())["trials"]
    return done.returncode, trials[-1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("healthy", "never-clears") else pytest.mark.wide)
        for name in CASES
    ],
)
def test_silent_errors_of_one_process(name: str, tmp_path: Path) -> None:
    code, trial = watched(tmp_path / "run", "--laws", name=name)
    verdict, says = CASES[name]
    assert (trial["verdict"], trial["culprits"]) == (verdict, [])
    assert says in str(trial["cause"])
    assert code == (0 if verdict == "clean" else 1)


@pytest.mark.wide
def test_without_laws_nothing_is_recorded(tmp_path: Path) -> None:
    code, trial = watched(tmp_path / "run", name="never-clears")
    assert (code, trial["verdict"]) == (0, "inconclusive")
    assert "a program of one process is recorded with --laws" in str(trial["not_seen"])
