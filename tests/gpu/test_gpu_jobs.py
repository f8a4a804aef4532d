"""`moediag watch` and `moediag attach` on jobs that compute on a GPU. Skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moediag import hardware
from moediag.result import devices
from tests.victims.table import marked

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

PROGRAM = Path(__file__).parents[1] / "victims" / "gpu_jobs.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MOEDIAG = (sys.executable, "-m", "moediag")
SAID = ["rank 0 is done", "rank 1 is done"]
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    alone = len(hardware.gpus()) < 2 and devices.shared(hardware.nccl()) == devices.SHARED
    if request.param == "nccl" and alone:
        pytest.skip(f"one GPU, and NCCL {hardware.nccl()} does not let two ranks share it")
    return str(request.param)


def watched(backend: str, name: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*MOEDIAG, "watch", "--json", "--out", str(folder / "run"), *options, "--",
         *TORCHRUN, str(PROGRAM), backend, name, str(folder / "end")],
        capture_output=True, text=True, timeout=180, check=False, env=os.environ | SHARING,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["trials"][-1]


@contextmanager
def running(backend: str, name: str, end: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*TORCHRUN, str(PROGRAM), backend, name, str(end)], stdout=subprocess.PIPE, text=True,
        env=os.environ | SHARING,
    )  # fmt: skip
    try:
        while not all(Path(f"{end}.{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def attached(process: subprocess.Popen[str], out: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*MOEDIAG, "attach", str(process.pid), "--json", "--patience", "3", "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["trials"][0]


def columns(trial: dict[str, Any]) -> set[str]:
    return {column for table in trial["tables"] for column in table["columns"]}


def test_watch_names_the_rank_that_called_alone(backend: str, tmp_path: Path) -> None:
    code, trial = watched(backend, "condition", tmp_path, "--on-hang", "abort")
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [0]), trial["cause"]
    (line,) = marked("condition", PROGRAM)
    assert line in trial["cause"], trial["cause"]


@pytest.mark.parametrize(
    ("name", "patience"),
    [("evaluates_alone", "30"), ("evaluates_while_the_others_reduce", "10")],
)
def test_a_rank_that_evaluates_alone_is_no_hang(
    backend: str, tmp_path: Path, name: str, patience: str
) -> None:
    """It waits for its device at nearly every look, for longer than the patience."""
    code, trial = watched(backend, name, tmp_path, "--on-hang", "abort", "--patience", patience)
    assert (code, trial["verdict"], trial["culprits"]) == (0, "clean", []), trial["cause"]


def test_laws_leave_healthy_training_alone(backend: str, tmp_path: Path) -> None:
    code, trial = watched(backend, "trains", tmp_path, "--laws")
    assert (code, trial["verdict"], trial["culprits"]) == (0, "clean", []), trial["cause"]


def test_laws_see_a_weight_that_one_rank_changed(backend: str, tmp_path: Path) -> None:
    code, trial = watched(backend, "overwritten", tmp_path, "--laws")
    assert (code, trial["verdict"]) == (1, "replica-divergence"), trial["cause"]
    assert trial["culprits"] == []  # two replicas: either may be right


def test_attach_to_a_job_that_hangs(backend: str, tmp_path: Path) -> None:
    with running(backend, "condition", tmp_path / "end") as process:
        code, trial = attached(process, tmp_path / "run")
    assert (code, trial["verdict"]) == (1, "hang"), trial["cause"]
    assert trial["culprits"] in ([], [0]), trial["cause"]
    assert "GPU" in columns(trial), trial["not_seen"]


def test_attach_to_a_job_that_computes(backend: str, tmp_path: Path) -> None:
    with running(backend, "computes", tmp_path / "end") as process:
        code, trial = attached(process, tmp_path / "run")
        (tmp_path / "end").touch()
        output, _ = process.communicate(timeout=120)
    # On a busy GPU each look finds both ranks at the wait for the device, which is undecided.
    assert (code, trial["verdict"]) in ((0, "clean"), (3, "inconclusive")), trial["cause"]
    assert trial["culprits"] == []
    assert (process.returncode, sorted(output.splitlines())) == (0, SAID)
