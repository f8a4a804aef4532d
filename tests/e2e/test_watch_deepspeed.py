"""`moediag watch` on DeepSpeed's ZeRO under its own launcher, in a separate stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack, StackError

pytestmark = [pytest.mark.e2e, pytest.mark.wide]
JOB = Path(__file__).parents[1] / "victims" / "deepspeed_job.py"
LINES = JOB.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def stack() -> Stack:
    try:
        return environment.ensure({"transformers": "5.23.0", "deepspeed": "0.19.8"})
    except StackError as error:
        pytest.skip(f"DeepSpeed cannot be installed here: {error}")


def watched(stack: Stack, folder: Path, name: str, stage: int) -> dict[str, object]:
    """Returns the trial from ``--json``."""
    programs = Path(stack.python).parent
    environ = {**stack.environ(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{programs}{os.pathsep}{environ.get('PATH', os.defpath)}"
    options = ("--json", "--on-hang", "abort", "--patience", "8", "--out", str(folder / "run"))
    port = str(29700 + os.getpid() % 200)
    launcher = (str(programs / "deepspeed"), "--num_gpus", "2", "--master_port", port)
    done = subprocess.run(
        [sys.executable, "-m", "moediag", "watch", *options, "--", *launcher, str(JOB), name,
         str(stage)],
        env=environ, timeout=180, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    trial: dict[str, object] = json.loads(done.stdout)["trials"][-1]
    return trial


def line(marker: str) -> str:
    (number,) = [i for i, text in enumerate(LINES, 1) if text.endswith(f"# {marker}")]
    return f"{JOB.name}:{number} "


@pytest.mark.parametrize("stage", [2, 3])
def test_a_healthy_job_is_clean(stack: Stack, tmp_path: Path, stage: int) -> None:
    trial = watched(stack, tmp_path, "clean", stage)
    assert (trial["verdict"], trial["culprits"]) == ("clean", [])
    assert "after 6 steps" in str(trial["cause"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_leaves_the_loop_is_the_culprit(
    stack: Stack, tmp_path: Path, stage: int
) -> None:
    trial = watched(stack, tmp_path, "skips", stage)
    assert (trial["verdict"], trial["culprits"]) == ("hang", [1]), trial["cause"]
    cause = str(trial["cause"])
    assert line("BLOCKS") in cause, cause
    there = line("REDUCES" if stage == 2 else "GATHERS")
    assert f"Rank 0 got there from {there}" in cause, "the library's line is not enough"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_with_an_extra_reduction_is_the_culprit(
    stack: Stack, tmp_path: Path, stage: int
) -> None:
    """ZeRO-2 has its own group, so ranks wait in a circle; ZeRO-3 has not, so sizes differ."""
    trial = watched(stack, tmp_path, "extra", stage)
    expected = "hang" if stage == 2 else "collective-mismatch"
    assert (trial["verdict"], trial["culprits"]) == (expected, [0]), trial["cause"]
    assert line("EXTRA") in str(trial["cause"])
