"""Finding our processes and ending them with a sequence of signals; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

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


def test_each_further_request_ends_a_grace(spawn: Spawner) -> None:
    class Asked(list[int]):
        """Somebody asks again each time it is looked at."""

        def __len__(self) -> int:
            self.append(2)
            return super().__len__()

    parent, line = spawn(ORPHAN, IGNORE)
    family = Family(parent.pid, spawn.token)
    parent.communicate(b"leave\n")
    gone, _ = shutdown.end(family, (600.0, 600.0, 5.0), Asked())
    assert {process.pid: step for process, step in gone.items()} == {int(line): "SIGKILL"}


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
