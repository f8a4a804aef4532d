"""Finding our processes and ending them with a sequence of signals; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moediag.launch import shutdown
from moediag.launch.processes import (
    ENV_LAUNCH,
    NEVER,
    Family,
    Process,
    catches,
    is_marked,
    read_stat,
)
from moediag.protocol import start_time

WAIT = "import signal, sys; print('ready', flush=True); signal.pause()"
IGNORE = (
    "import signal, sys\n"
    "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n" + WAIT
)
# Starts a child in a new session, prints its pid once it is ready, and exits.
ORPHAN = (
    "import subprocess, sys\n"
    "p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,\n"
    "                     stdout=subprocess.PIPE)\n"
    "p.stdout.readline()\n"
    "print(p.pid, flush=True)\n"
    "sys.stdin.readline()\n"
)


class Spawner:
    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, code: str, *args: str) -> tuple[subprocess.Popen[bytes], bytes]:
        """The process, and the first line it printed."""
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, ENV_LAUNCH: self.token},
        )
        self.processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()


@pytest.fixture
def spawn() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    for process in spawner.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_stat_of_this_process() -> None:
    stat = read_stat(os.getpid())
    assert stat is not None
    assert (stat.ppid, stat.group, stat.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert stat.alive
    assert stat.cpu > 0
    assert read_stat(2**22 + 1) is None


def test_catches_detects_handled_signals(spawn: Spawner) -> None:
    process, _ = spawn(WAIT)
    assert catches(process.pid, signal.SIGINT)  # Python's own handler
    assert not catches(process.pid, signal.SIGUSR1)
    assert not catches(2**22 + 1, signal.SIGUSR1)


def test_a_process_is_identified_by_pid_and_start_time(spawn: Spawner) -> None:
    child, _ = spawn(WAIT)
    process = Process.of(child.pid)
    assert process.alive and process.started == start_time(child.pid)
    before = Process(child.pid, process.started - 1)  # it ended, and its pid was reused
    before.send(signal.SIGKILL)
    assert not before.alive and before.stat() is None
    assert child.poll() is None and process.alive
    process.send(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not process.alive
    assert Process.of(child.pid) == Process(child.pid, NEVER)
    process.send(signal.SIGKILL)  # no process has the pid


def test_the_marker_must_match_exactly(spawn: Spawner) -> None:
    process, _ = spawn(WAIT)
    assert is_marked(process.pid, spawn.token)
    assert not is_marked(process.pid, spawn.token[:-1])
    assert not is_marked(os.getpid(), spawn.token)


def test_an_orphan_in_another_session_is_found_and_stopped(spawn: Spawner) -> None:
    parent, line = spawn(ORPHAN, IGNORE)
    orphan = int(line)
    family = Family(parent.pid, spawn.token)
    parent.communicate(b"leave\n")
    assert set(family.alive()) == {orphan}
    gone, stuck = shutdown.end(family, (0.05, 0.05, 5.0))
    assert {process.pid: step for process, step in gone.items()} == {orphan: "SIGKILL"}
    assert stuck == []
    assert family.alive() == {}


def test_a_process_that_handles_the_first_signal_exits_on_it(spawn: Spawner) -> None:
    process, _ = spawn(WAIT)
    gone, stuck = shutdown.end(Family(process.pid, spawn.token), (5.0, 5.0, 5.0))
    assert {ended.pid: step for ended, step in gone.items()} == {process.pid: "SIGINT"}
    assert stuck == []


class Asked(list[int]):
    """Somebody asks again by ``sig`` each time it is looked at."""

    def __init__(self, sig: int) -> None:
        self.sig = sig

    def __getitem__(self, at: Any) -> Any:
        self.append(self.sig)
        return super().__getitem__(at)


def test_each_further_ctrl_c_ends_a_grace(spawn: Spawner) -> None:
    parent, line = spawn(ORPHAN, IGNORE)
    family = Family(parent.pid, spawn.token)
    parent.communicate(b"leave\n")
    gone, _ = shutdown.end(family, (600.0, 600.0, 5.0), Asked(signal.SIGINT))
    assert {process.pid: step for process, step in gone.items()} == {int(line): "SIGKILL"}


SAVES = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: (sys.stdin.readline(), print("saved"), sys.exit(0)))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_further_sigterm_does_not_end_a_job_that_saves_its_state(spawn: Spawner) -> None:
    """A scheduler may signal twice. SIGINT is ignored, as in the import of torch."""
    process, _ = spawn(SAVES)
    family = Family(process.pid, spawn.token)
    asked = Asked(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(shutdown.end, family, (600.0, 600.0, 5.0), asked)
        while len(asked) < 50:
            assert process.poll() is None
        output, _ = process.communicate(b"go on\n")
        gone, stuck = ending.result()
    assert (process.returncode, output, list(gone.values()), stuck) == (
        0, b"saved\n", ["SIGTERM"], [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "hangs", "graces"),
    [
        ([signal.SIGINT], False, (4.0, 4.0)),
        ([signal.SIGINT], True, (1.0, 7.0)),
        ([signal.SIGTERM], False, (0.0, 8.0)),
        ([signal.SIGHUP], True, (0.0, 8.0)),
        ([signal.SIGINT, signal.SIGTERM], False, (0.0, 8.0)),
    ],
)
def test_a_job_is_killed_after_its_grace_whatever_comes_first(
    asked: list[int], hangs: bool, graces: tuple[float, float]
) -> None:
    assert shutdown.of_job(8.0, asked, hangs)[:2] == graces
    assert shutdown.of_job(0.0, asked, hangs)[:2] == (0.0, 0.0)


def test_a_signal_without_a_grace_is_not_sent(spawn: Spawner) -> None:
    process, _ = spawn(WAIT)
    gone, stuck = shutdown.end(Family(process.pid, spawn.token), (0.0, 5.0, 5.0))
    assert (list(gone.values()), stuck) == (["SIGTERM"], [])


def test_a_stopped_process_is_ended_by_the_first_signal(spawn: Spawner) -> None:
    """SIGSTOP holds back all signals but SIGKILL, and a scheduler does not wait for a second."""
    process, _ = spawn(WAIT)
    stopped = Process.of(process.pid)
    process.send_signal(signal.SIGSTOP)
    gone, stuck = shutdown.end(Family(process.pid, spawn.token), (30.0, 0.1, 5.0))
    assert (gone[stopped], stuck) == ("SIGINT", [])
    assert process.wait(10) in (-signal.SIGINT, 1)


STOPS_LATE = """
import os, signal, sys
def late(*_):
    for _ in range(2):  # the second time after it was continued
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(1)
signal.signal(signal.SIGINT, late)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_process_that_stops_after_the_first_signal_is_continued(spawn: Spawner) -> None:
    process, _ = spawn(STOPS_LATE)
    gone, stuck = shutdown.end(Family(process.pid, spawn.token), (30.0, 0.1, 5.0))
    assert (list(gone.values()), stuck) == (["SIGINT"], [])


def test_kept_and_unrelated_processes_are_not_stopped(spawn: Spawner) -> None:
    kept, _ = spawn(WAIT)
    ended, _ = spawn(WAIT)
    stranger, _ = Spawner.__call__(other := Spawner(), WAIT)
    try:
        gone, _ = shutdown.end(Family(ended.pid, spawn.token, keep=[kept.pid]), (5.0, 5.0, 5.0))
        assert {process.pid for process in gone} == {ended.pid}
        assert kept.poll() is None
        assert stranger.poll() is None
    finally:
        spawn.processes += other.processes


def test_only_unrelated_processes_that_live_are_remembered(spawn: Spawner) -> None:
    """On a machine that starts many others beside a job of days."""
    root, _ = spawn(WAIT)
    stranger, _ = Spawner.__call__(other := Spawner(), WAIT)
    spawn.processes += other.processes
    family = Family(root.pid, spawn.token)
    family.alive()
    assert stranger.pid in {pid for pid, _ in family._unrelated}
    stranger.kill()
    stranger.wait()
    family.alive()
    assert stranger.pid not in {pid for pid, _ in family._unrelated}
