"""`--executor` on a real Slurm of four nodes and a real Ray of two, in ordinary conditions."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from moediag.errors import MachineError
from moediag.lab.campaign.executors import Choice, Lost, Remote, opened
from tests import cluster
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

STACK = {"transformers": "5.23.0"}
HUNT = ("hunt", "--release", "5.23.0", "--family", "qwen3_moe", "--relation", "plans")
LONGEST = 300.0  # seconds for one command


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if why := cluster.no_slurm():
        pytest.skip(f"Slurm: {why}")
    with (
        cluster.slurm(tmp_path_factory.mktemp("slurm")) as environ,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", environ["SLURM_CONF"])
        yield


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The second node starts in a Python that has ray and lacks moediag, if there is one."""
    if why := cluster.no_ray():
        pytest.skip(f"Ray: {why}")
    folder = tmp_path_factory.mktemp("r")
    with (
        cluster.ray(folder, {"PYTHON": _without_moediag(folder), "PYTHONPATH": ""}) as environ,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("RAY_ADDRESS", *cluster.RAY):
            patch.setenv(name, environ[name])
        yield


def _without_moediag(folder: Path) -> str:
    """Returns a Python with the packages of this one but moediag."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "v"], check=True)
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    (site,) = (folder / "v" / "lib").glob("python3.*/site-packages")
    (site / "ray.pth").write_text(str(Path(spec.origin).parents[1]))  # whose own .pth are not read
    return str(folder / "v" / "bin" / "python")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs items that sleep; returns what became of each."""
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # Ray's workers search the command's folder too

    def one(remote: Remote, seconds: float, number: int) -> str:
        try:
            remote.call(f"item {number}", functools.partial(time.sleep, seconds))
        except Lost as lost:
            return str(lost)
        return ""

    def call(
        items: int = 2, seconds: float = 0.2, kind: str = "slurm", limit: float = 60.0,
        queue: float = 120.0, folder: Path | None = None, **arguments: str,
    ) -> list[str]:  # fmt: skip
        where = folder or tmp_path / "out"
        where.mkdir(exist_ok=True)
        choice = Choice(kind, arguments, limit, queue)
        with opened(choice, where, said.append) as remote, ThreadPoolExecutor(items) as pool:
            assert remote is not None
            return [*pool.map(functools.partial(one, remote, seconds), range(items))]

    return call


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _until(holds: Callable[[], object], longest: float = LONGEST) -> None:
    end = time.monotonic() + longest
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


@contextlib.contextmanager
def _changed(*words: str) -> Iterator[None]:
    """Sets a node's or partition's state, and back."""
    subprocess.run(["scontrol", "update", *words], check=True)
    try:
        yield
    finally:
        up = "state=resume" if words[0].startswith("nodename") else "state=up"
        subprocess.run(["scontrol", "update", words[0], up], check=True)


# ------------------------------------------------------------------------ Slurm


def test_slurm_workers_perform_several_items(slurm: None, run: Any, tmp_path: Path) -> None:
    assert run(items=6) == [""] * 6
    left = {path.suffix for path in (tmp_path / "out" / "slurm").iterdir()}
    assert left <= {".up", ".log"} and not [*tmp_path.rglob(".seen-by-workers-*")]
    _until(lambda: not _output("squeue", "-h"))


def test_slurm_partition_with_a_short_limit(slurm: None, run: Any) -> None:
    with pytest.raises(MachineError, match="PartitionTimeLimit"):
        run(limit=3600.0, partition="short")
    with pytest.raises(MachineError, match="sbatch does not accept the job: "):
        run(partition="none")


def test_slurm_drained_node_then_another_partition(slurm: None, run: Any, said: list[str]) -> None:
    with _changed("nodename=n2", "state=drain", "reason=test"):
        found = run(partition="short", queue=40.0)
        assert found == ["not run, because it waited 40 s in the queue"] * 2
        assert any("DRAINED" in text for text in said)
        assert run(partition="one") == ["", ""]


def test_slurm_item_longer_than_its_limit(slurm: None, run: Any) -> None:
    assert run(seconds=30.0, limit=2.0) == ["not decided: it gave no result within 2 s"] * 2
    _until(lambda: not _output("squeue", "-h"))


def test_slurm_limit_of_a_job(slurm: None, run: Any) -> None:
    """Slurm looks twice a minute."""
    found = run(seconds=200.0, limit=300.0, time="1", partition="one")
    assert all(re.fullmatch(r"not decided: ran \d+ s of 60 s in Slurm job \d+ on n1", text)
               for text in found), found  # fmt: skip


def test_slurm_node_without_the_package_is_avoided(slurm: None, run: Any, said: list[str]) -> None:
    """Two items fill n1, so the third worker starts on n4."""
    assert run(items=3, seconds=3.0, partition="mixed") == [""] * 3
    named = [text for text in said if "the worker on n4 did not start" in text]
    assert len(named) == 2 and "this node is avoided" in named[0] and "not used" in named[1]


def test_slurm_preemption_and_a_cluster_smaller_than_asked(
    slurm: None, run: Any, said: list[str], tmp_path: Path
) -> None:
    prior: list[str] = []

    def preempt() -> None:
        _until(lambda: [*tmp_path.rglob("*.taken")])
        prior.append(_output("sbatch", "-p", "prod", "-n2", "--parsable", "--wrap", "sleep 2",
                             "--output=/dev/null"))  # fmt: skip

    with ThreadPoolExecutor(1) as pool:
        pool.submit(preempt)
        assert run(items=4, seconds=5.0, partition="one") == [""] * 4
    assert prior and any("PREEMPTED" in text for text in said)


def test_slurm_full_queue(slurm: None, run: Any, said: list[str]) -> None:
    blocking = _output("sbatch", "-p", "one", "-n2", "--parsable", "--wrap", "sleep 45",
                       "--output=/dev/null")  # fmt: skip
    assert blocking
    assert run(partition="one") == ["", ""]
    assert any("Resources" in text or "Priority" in text for text in said)


def test_slurm_controller_away_for_a_while(slurm: None, run: Any) -> None:
    here = psutil.Process().children()
    (controller,) = (process for process in here if process.name() == "slurmctld")

    def away() -> None:
        time.sleep(3)
        controller.suspend()
        time.sleep(20)
        controller.resume()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(away)
        assert run(items=3, seconds=12.0) == [""] * 3


def test_slurm_two_campaigns_at_once(slurm: None, run: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = (tmp_path / "one", tmp_path / "two")
        found = pool.map(lambda folder: run(items=3, seconds=1.0, folder=folder), folders)
        assert [*found] == [[""] * 3] * 2


KILLED = """
import functools, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from moediag.lab.campaign.executors import Choice, opened
with opened(Choice("slurm"), Path(sys.argv[1]), print) as remote, ThreadPoolExecutor(4) as pool:
    work = functools.partial(time.sleep, 8.0)
    [*pool.map(lambda n: remote.call(f"item {n}", work), range(4))]
"""


def test_slurm_jobs_of_a_killed_command_are_adopted(slurm: None, run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)]) as killed:
        _until(lambda: len([*folder.rglob("*.taken")]) == 4)
        killed.kill()
    logs = len([*folder.rglob("*.log")])
    assert run(items=4, seconds=8.0) == [""] * 4
    assert len([*folder.rglob("*.log")]) == logs, "no other job was started"
    assert not [*tmp_path.rglob(".seen-by-workers-*")]


# ------------------------------------------------------------------------ Ray


def test_ray_node_without_the_package_is_avoided(ray: None, run: Any, said: list[str]) -> None:
    assert run(items=6, kind="ray", num_cpus="1") == [""] * 6
    named = [text for text in said if "cannot start moediag" in text]
    assert len(named) == 2 and "this node is avoided" in named[0] and "not used" in named[1]


def test_ray_request_that_no_node_meets(ray: None, run: Any) -> None:
    with pytest.raises(MachineError, match=r"CPU 64 \(the largest has 1\)"):
        run(kind="ray", num_cpus="64")


def test_ray_cannot_be_reached(run: Any) -> None:
    if why := cluster.no_ray():
        pytest.skip(f"Ray: {why}")
    with pytest.raises(MachineError, match=r"no Ray cluster can be reached on 127\.0\.0\.1:1"):
        run(kind="ray", address="127.0.0.1:1")


# ------------------------------------------------------------------------ the commands


@pytest.fixture(params=["ray", "slurm"])
def executor(request: pytest.FixtureRequest) -> str:
    need(STACK)
    request.getfixturevalue(request.param)
    return str(request.param)


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
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if executor == "ray" and words and words[0].startswith("ray::qwen3_moe"):
            found.append(process)
        if executor == "slurm" and "moediag.lab.campaign.executors.pilot" in words:
            found.append(process)
    return found


@pytest.mark.stack
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
        taken = "ray/*" if executor == "ray" else "slurm/*.taken"
        _until(lambda: _workers(executor) and [*(tmp_path / "hunt").glob(taken)])
        _workers(executor)[0].kill()
        out, said = resumed.communicate(timeout=LONGEST)
    assert resumed.returncode == 0, said
    assert "qwen3_moe plans: its job was lost (" in said
    (cell,) = json.loads(out)["cells"]
    assert [way["holds"] for way in cell["outcome"]["ways"]] == [True, True]
    assert not [*(tmp_path / "hunt").glob(".seen-by-workers-*")]


@pytest.mark.stack
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
