"""`moediag attach` with the pid of mpirun or srun. The ranks import a stand-in for torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.abroad import launchers
from tests import cluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

WAITS = """\
import os


def barrier():
    print("waits", flush=True)
    os.read(os.pipe()[0], 1)
"""
TRAIN = """\
import os

from torch.distributed import calls

is_first = os.environ["RANK"] == "0"
if is_first:
    calls.barrier()  # as before a save
calls.barrier()
"""
ABSENT = {
    "mpirun": "" if shutil.which("mpirun") else "no mpirun (Debian: openmpi-bin)",
    "srun": cluster.no_slurm(),
}


@pytest.mark.parametrize("launcher", ABSENT)
def test_a_call_under_a_condition_on_the_rank(launcher: str, tmp_path: Path) -> None:
    if ABSENT[launcher]:
        pytest.skip(ABSENT[launcher])
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "calls.py").write_text(WAITS)
    (tmp_path / "train.py").write_text(TRAIN)
    with launchers.environment(launcher) as own:
        words = launchers.command(launcher, sys.executable, 3)
        job = subprocess.Popen(
            [*words, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            env=os.environ | own | {"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        try:
            assert job.stdout is not None
            said = ""
            while said.count("waits") < 3:  # mpirun joins lines
                line = job.stdout.readline()
                assert line, said
                said += line
            done = subprocess.run(
                [sys.executable, "-m", "moediag", "attach", str(job.pid), "--patience", "2",
                 "--json", "--out", str(tmp_path / "run")],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        finally:
            for one in (psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)):
                one.terminate()
            job.communicate(timeout=60)
    assert done.returncode == 1, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert (trial["verdict"], trial["culprits"], trial["world_size"]) == ("hang", [0], 3)
    assert "train.py:6" in trial["cause"]
