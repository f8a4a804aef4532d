"""Both launchers with real gloo ranks: the report is correct, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag import protocol
from moediag.evidence.launch_record import read_launch
from moediag.evidence.model import ExitStatus
from moediag.lab.launch.launcher import launcher
from moediag.launch.base import Launcher
from moediag.launch.settings import LaunchOptions, Progress
from moediag.protocol import ReferenceTask, Trial
from tests.e2e.marked import MARK, eventually, gone, marked

pytestmark = pytest.mark.e2e

VICTIMS = Path(__file__).parents[1] / "victims"
STACK = SimpleNamespace(python=Path(sys.executable), pythonpath=[VICTIMS], key="here")
OK = ExitStatus(code=0)


def options(mark: str, **changes: object) -> LaunchOptions:
    environment = {
        "MOEDIAG_RANK_MAIN": "launched:main", "MOEDIAG_WARM": "launched:warm", MARK: mark,
    }  # fmt: skip
    return LaunchOptions(**{"quiescence": 1.0, "environment": environment, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    mark = uuid.uuid4().hex
    chosen, temporary = options(mark), tmp_path_factory.mktemp("tmp")
    chosen = replace(chosen, environment={**chosen.environment, "TMPDIR": str(temporary)})
    with launcher("fork", STACK, tmp_path_factory.mktemp("fork"), chosen) as launch:
        yield launch
    assert marked(mark) == []


LAUNCHERS = pytest.mark.parametrize("both", ["fork", "torchrun"], indirect=True)
# What differs between them is how a trial starts and how its launcher ends; they share the rest.
FORK_IN_CI = pytest.mark.parametrize(
    "both", ["fork", pytest.param("torchrun", marks=pytest.mark.wide)], indirect=True
)


@pytest.fixture
def both(request: pytest.FixtureRequest, forks: Launcher, tmp_path: Path) -> Iterator[Launcher]:
    if request.param == "fork":
        yield forks
        return
    with launcher("torchrun", STACK, tmp_path, options(uuid.uuid4().hex)) as launch:
        yield launch


def trial(variant: str, **changes: object) -> Trial:
    return Trial(**{"name": variant, "scenario": "test", "variant": variant, **changes})  # type: ignore[arg-type]


def left_over(launch: Launcher) -> list[int]:
    """Processes of a finished trial that are still there; the fork launcher's host may be."""
    host = getattr(launch, "_host", None)
    mark = launch.options.environment[MARK]
    return [p for p in marked(mark) if host is None or p != host.pid]


@LAUNCHERS
def test_a_successful_launch_is_reported(both: Launcher, tmp_path: Path) -> None:
    def watch(progress: Progress) -> None:
        if progress.doing == "running" and set(progress.states) == {0, 1}:
            (tmp_path / "t" / "seen").touch()

    record = both.run(trial("watched"), tmp_path / "t", watch)
    assert record.succeeded
    assert record.exits == {0: OK, 1: OK}
    assert record.deaths == ()
    assert record.first_progress is not None
    assert set(record.pids) == {0, 1}
    assert read_launch(tmp_path / "t" / protocol.LAUNCH_FILE) == record
    for rank in (0, 1):
        log = (tmp_path / "t" / protocol.output_file(rank)).read_text()
        assert f"rank {rank} prints" in log
        assert "native output" in log
        env = json.loads((tmp_path / "t" / f"env-{rank}.json").read_text())
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    assert left_over(both) == []


@LAUNCHERS
def test_the_rank_that_raised_first_is_reported(both: Launcher, tmp_path: Path) -> None:
    record = both.run(trial("exception"), tmp_path / "t")
    assert record.exits[1] == ExitStatus(code=1)
    assert record.deaths[0].rank == 1
    assert not record.succeeded
    assert record.launch_error == ""
    error = json.loads((tmp_path / "t" / protocol.error_file(1)).read_text())
    assert error["message"]["message"] == "ValueError: the router is gone"
    assert "the router is gone" in (tmp_path / "t" / protocol.output_file(1)).read_text()


def test_a_rank_that_raised_leaves_no_temporary_files(forks: Launcher, tmp_path: Path) -> None:
    temporary = Path(forks.options.environment["TMPDIR"])
    forks.run(trial("exception"), tmp_path / "t")
    assert (tmp_path / "t" / protocol.error_file(1)).exists()
    assert list(temporary.glob("pytorch-errorfile*")) == []
    assert list(tmp_path.glob("t/pytorch-errorfile*")) == []


@FORK_IN_CI
def test_a_killed_rank_is_reported(both: Launcher, tmp_path: Path) -> None:
    record = both.run(trial("killed"), tmp_path / "t")
    assert record.exits[1] == ExitStatus(signal="SIGKILL")
    assert record.deaths[0].rank == 1
    assert record.stall is None


@FORK_IN_CI
def test_peers_of_a_dead_rank_are_captured_before_they_are_stopped(
    both: Launcher, tmp_path: Path
) -> None:
    record = both.run(trial("death-beside-waiter"), tmp_path / "t")
    assert record.exits == {0: ExitStatus(signal="SIGTERM", by_us=True), 1: ExitStatus(code=1)}
    assert [d.rank for d in record.deaths] == [1]
    assert record.capture_seconds is not None
    assert "death_beside_waiter" in (tmp_path / "t" / protocol.stacks_file(0)).read_text()
    seen = tmp_path / "t" / "capture" / "rank-0.pyspy.json"
    refused = any("rank 0: Python frames" in line for line in record.not_seen)
    assert refused or "death_beside_waiter" in seen.read_text()


@FORK_IN_CI
def test_a_hang_is_reported(both: Launcher, tmp_path: Path) -> None:
    record = both.run(trial("hang"), tmp_path / "t")
    assert record.stall is not None
    assert (record.stall.waiting, record.stall.elsewhere) == ((0,), (1,))
    assert not record.timed_out
    assert all(status.by_us for status in record.exits.values())
    assert record.deaths == ()
    capture = tmp_path / "t" / "capture"
    if not any("Python frames" in line for line in record.not_seen):
        assert "all_reduce" in (capture / "rank-0.pyspy.json").read_text()
        assert "hang" in (capture / "rank-1.pyspy.json").read_text()
    assert "State:" in (capture / "rank-0.proc.txt").read_text()
    assert left_over(both) == []


def test_a_hang_without_a_heartbeat_is_found_from_stacks(forks: Launcher, tmp_path: Path) -> None:
    record = forks.run(trial("hang-two-groups", timeout=60.0), tmp_path / "t")
    assert record.stall is not None
    assert record.stall.waiting == (0, 1)


def test_a_busy_rank_is_not_a_hang_before_the_timeout(forks: Launcher, tmp_path: Path) -> None:
    record = forks.run(trial("busy", timeout=3.0), tmp_path / "t")
    assert record.stall is None
    assert record.timed_out
    assert record.capture_seconds is not None
    assert all(status.by_us for status in record.exits.values())


def test_waiting_outside_a_collective_is_not_a_hang(forks: Launcher, tmp_path: Path) -> None:
    record = forks.run(trial("blocked-outside", timeout=3.0), tmp_path / "t")
    assert (record.stall, record.timed_out) == (None, True)


def test_a_slow_start_is_not_a_hang(forks: Launcher, tmp_path: Path) -> None:
    assert forks.run(trial("slow-start"), tmp_path / "t").succeeded


@FORK_IN_CI
def test_ranks_that_ignore_signals_are_killed_with_their_children(
    both: Launcher, tmp_path: Path
) -> None:
    record = both.run(trial("stubborn"), tmp_path / "t")
    assert (tmp_path / "t" / "ready-0").exists()
    assert record.stall is not None
    assert {s.signal for s in record.exits.values()} == {"SIGKILL"}
    assert left_over(both) == []


@FORK_IN_CI
def test_a_reference_has_one_rank(both: Launcher, tmp_path: Path) -> None:
    record = both.run(trial("reference", task=ReferenceTask(), world_size=4), tmp_path / "t")
    assert record.exits == {0: OK}
    assert json.loads((tmp_path / "t" / "reference.json").read_text()) == "1"


def test_a_failing_reference_has_its_exit_and_error(forks: Launcher, tmp_path: Path) -> None:
    record = forks.run(trial("early-exit", task=ReferenceTask()), tmp_path / "t")
    assert record.exits == {0: ExitStatus(code=1)}
    assert (tmp_path / "t" / protocol.error_file(0)).exists()


def test_four_ranks_are_launched(forks: Launcher, tmp_path: Path) -> None:
    assert forks.run(trial("success", world_size=4), tmp_path / "t").succeeded


def test_a_host_that_cannot_start_is_a_launch_error(tmp_path: Path) -> None:
    broken = SimpleNamespace(python=Path("/bin/false"), pythonpath=[], key="broken")
    with launcher("fork", broken, tmp_path, options("none")) as launch:
        record = launch.run(trial("success"), tmp_path / "t")
    assert "host" in record.launch_error
    assert record.exits == {}


def start_parent(kind: str, variant: str, tmp_path: Path) -> tuple[subprocess.Popen[bytes], str]:
    mark = uuid.uuid4().hex
    program = str(VICTIMS / "launch_parent.py")
    command = [sys.executable, program, kind, variant, str(tmp_path), mark]
    parent = subprocess.Popen(command, start_new_session=True)
    ready = [tmp_path / variant / f"ready-{rank}" for rank in (0, 1)]
    eventually(lambda: all(path.exists() for path in ready), "the ranks did not get ready")
    return parent, mark


def pid_of(target: str, kind: str, folder: Path, parent: int) -> int:
    rank = json.loads((folder / "rank-1.pid").read_text())["pid"]
    if target == "rank":
        return int(rank)
    agent = int(Path(f"/proc/{rank}/stat").read_text().rsplit(")", 1)[1].split()[1])
    if target == "agent":
        return agent
    host = int(Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return {"host": host, "moediag": parent}[target]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        *(("fork", target) for target in ("moediag", "host", "agent")),
        *(("torchrun", target) for target in ("moediag", "agent")),
        *(pytest.param(kind, "rank", marks=pytest.mark.wide) for kind in ("fork", "torchrun")),
    ],
)
def test_sigkill_of_any_process_leaves_no_process(kind: str, target: str, tmp_path: Path) -> None:
    parent, mark = start_parent(kind, "stubborn-childless", tmp_path)
    folder = tmp_path / "stubborn-childless"
    os.kill(pid_of(target, kind, folder, parent.pid), signal.SIGKILL)
    parent.wait(60)
    gone(mark)
    if target == "moediag":
        return
    record = read_launch(folder / protocol.LAUNCH_FILE)
    assert not record.succeeded
    if target == "rank":
        assert record.exits[1] == ExitStatus(signal="SIGKILL")
        assert record.deaths[0].rank == 1
    else:
        assert record.launch_error


@pytest.mark.parametrize("kind", ["fork", pytest.param("torchrun", marks=pytest.mark.wide)])
def test_ctrl_c_stops_the_ranks_and_keeps_the_record(kind: str, tmp_path: Path) -> None:
    parent, mark = start_parent(kind, "stubborn", tmp_path)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(60) == 130
    assert marked(mark) == []
    record = read_launch(tmp_path / "stubborn" / protocol.LAUNCH_FILE)
    assert record.interrupted
    assert {s.by_us for s in record.exits.values()} == {True}
