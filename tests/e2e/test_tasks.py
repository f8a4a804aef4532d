"""`moediag watch -- srun …`: ranks that are not descendants of the started command. Tested with a
stand-in, ``tests/victims/like_slurm.py``, and with Slurm if it is installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.victims.table import VICTIMS

pytestmark = pytest.mark.e2e

TASKS = Path(__file__).parents[1] / "victims" / "tasks.py"
STAND_IN = TASKS.with_name("like_slurm.py")


@pytest.fixture(scope="module")
def like_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The first words of a command, as ``srun -n``."""
    path = tmp_path_factory.mktemp("slurm") / "socket"
    process = subprocess.Popen([sys.executable, str(STAND_IN), "daemon", str(path)])
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    try:
        yield [sys.executable, str(STAND_IN), "srun", str(path)]
    finally:
        process.kill()
        process.wait()


def watch(tmp_path: Path, name: str, srun: list[str], ranks: int) -> tuple[int, dict[str, Any]]:
    (victim,) = [v for v in VICTIMS if v.name == name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_PORT=port)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    own = ["--json", "--on-hang", "abort", "--out", str(tmp_path / "run"), *victim.options]
    done = subprocess.run(
        [sys.executable, "-m", "moediag", "watch", *own, "--", *srun, str(ranks),
         sys.executable, str(TASKS), name],
        env=env, timeout=180, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["trials"][-1]


def left() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(TASKS) in (p.info["cmdline"] or [])]


@pytest.mark.wide
def test_tasks_outside_the_process_tree_are_found_and_stopped(
    like_slurm: list[str], tmp_path: Path
) -> None:
    code, trial = watch(tmp_path, "data_loader", like_slurm, 2)
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
    assert "waits for data" in trial["cause"]
    assert not left()


@pytest.mark.wide
def test_healthy_tasks_are_clean(like_slurm: list[str], tmp_path: Path) -> None:
    code, trial = watch(tmp_path, "clean", like_slurm, 2)
    assert (code, trial["verdict"]) == (0, "clean"), trial["cause"]


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("sinfo") is None, reason="no Slurm here")
@pytest.mark.parametrize("name", ["skips", "raises", "clean"])
def test_slurm_tasks_are_watched(name: str, tmp_path: Path) -> None:
    if subprocess.run(["sinfo"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("this Slurm has no controller")
    (victim,) = [v for v in VICTIMS if v.name == name]
    code, trial = watch(tmp_path, name, ["srun", "--overcommit", "-n"], victim.ranks)
    assert trial["verdict"] in victim.verdicts, trial["cause"]
    assert trial["culprits"] == list(victim.culprits), trial["cause"]
    assert code == (0 if victim.healthy else 1)
    assert not left()
