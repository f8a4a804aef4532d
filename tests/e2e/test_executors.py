"""`--executor` on a real Slurm of one node and a real local Ray: interrupted, resumed, with a
worker that is killed in the middle."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]

STACK = {"transformers": "5.23.0"}
HUNT = ("hunt", "--release", "5.23.0", "--family", "qwen3_moe", "--relation", "plans")
LONGEST = 300.0  # seconds for one command
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
MpiDefault=none
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Slurm that answers, or one of this machine alone."""
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed: pip install 'moediag[slurm]'")
    for program in ("slurmctld", "slurmd", "sbatch", "munge"):
        if shutil.which(program) is None:
            pytest.skip(f"Slurm is not installed here: no {program} (Debian: slurm-wlm, munge)")
    if _says("sinfo", "--noheader") == 0:
        yield
        return
    if (
        os.geteuid()
        or subprocess.run("munge -n | unmunge", shell=True, capture_output=True).returncode
    ):
        pytest.skip("no Slurm answers; starting one needs root and a running munged")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    text = CONFIGURATION.format(host=os.uname().nodename, folder=folder, cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        daemons = [subprocess.Popen([name, "-D"], stderr=subprocess.DEVNULL)
                   for name in ("slurmctld", "slurmd")]  # fmt: skip
        try:
            _until(lambda: "idle" in _output("sinfo", "--noheader"))
            yield
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(60)


@pytest.fixture
def ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'moediag[ray]'")


@pytest.fixture(params=["ray", "slurm"])
def executor(request: pytest.FixtureRequest) -> str:
    need(STACK)
    request.getfixturevalue(request.param)
    return str(request.param)


def _says(*command: str) -> int:
    return subprocess.run(command, capture_output=True).returncode


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _until(holds: Callable[[], object], longest: float = LONGEST) -> None:
    end = time.monotonic() + longest
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


@contextlib.contextmanager
def _command(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "moediag", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()  # a command that still runs hangs


def _workers(executor: str) -> list[psutil.Process]:
    """Returns the processes that run an item now."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or []
        if executor == "ray" and words and words[0].startswith("ray::qwen3_moe"):
            found.append(process)
        if executor == "slurm" and "submitit.core._submit" in words and "srun" not in words[0]:
            found.append(process)
    return [one for one in found if "bash" not in one.info["name"]]


def test_interrupted_then_a_worker_is_killed(executor: str, tmp_path: Path) -> None:
    words = (*HUNT, "--executor", executor, "--out", str(tmp_path / "hunt"))
    with _command(*words) as interrupted:
        _until(lambda: _workers(executor))
        interrupted.send_signal(signal.SIGINT)
        _, said = interrupted.communicate(timeout=LONGEST)
    assert interrupted.returncode == 130, said
    assert "To resume: moediag hunt" in said
    _until(lambda: not _workers(executor))

    with _command(*words, "--resume", "--json") as resumed:
        _until(lambda: _workers(executor))
        _workers(executor)[0].kill()
        out, said = resumed.communicate(timeout=LONGEST)
    assert resumed.returncode == 0, said
    assert "qwen3_moe plans: its job was lost (" in said
    (cell,) = json.loads(out)["cells"]
    assert [way["holds"] for way in cell["outcome"]["ways"]] == [True, True]
    assert not [*(tmp_path / "hunt").glob(".seen-by-workers-*")]


def test_matrix_bisect_and_nightly(executor: str, tmp_path: Path) -> None:
    for version in ("4.53.2", "4.57.6", "5.0.0"):
        need({"transformers": version})

    def run(*words: str, out: str) -> Any:
        with _command(
            *words, "--executor", executor, "--out", str(tmp_path / out), "--json"
        ) as one:
            printed, said = one.communicate(timeout=LONGEST)
        assert one.returncode in (0, 1), said
        return json.loads(printed)

    table = run("matrix", "expert-starvation", "--releases", "4.53.2", out="matrix")
    assert [cell["shows"] for cell in table["cells"]] == [True]
    answer = run("bisect", "expert-starvation", "--bad", "4.57.6", "--good", "5.0.0", out="bisect")
    assert answer["timeline"] == "4.57 B │ 5.0 G"
    assert answer["environment"]["machines"] == f"those of {executor}"
    night = run(
        "nightly", "--scenario", "expert-starvation", "--track", "pinned",
        "--history", str(tmp_path / "history"), out="night",
    )["night"]  # fmt: skip
    assert [job["finished"] for job in night["jobs"]] == [True]
    assert {entry["state"] for entry in night["entries"]} <= {"good", "bad"}


def test_slurm_refuses_a_partition(slurm: None, tmp_path: Path) -> None:
    need(STACK)
    words = (
        "--executor",
        "slurm",
        "--executor-arg",
        "partition=none",
        "--out",
        str(tmp_path / "h"),
    )
    with _command(*HUNT, *words) as refused:
        _, said = refused.communicate(timeout=LONGEST)
    assert refused.returncode == 4
    assert "error: sbatch does not accept the job: " in said and "partition" in said


def test_ray_cannot_be_reached(ray: None, tmp_path: Path) -> None:
    need(STACK)
    words = ("--executor", "ray", "--executor-arg", "address=127.0.0.1:1", "--out")
    with _command(*HUNT, *words, str(tmp_path / "h")) as refused:
        _, said = refused.communicate(timeout=LONGEST)
    assert refused.returncode == 4
    assert "error: no Ray cluster can be reached on 127.0.0.1:1" in said
