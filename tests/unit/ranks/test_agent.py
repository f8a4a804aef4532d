"""The observer in the elastic agent: reports the end of ranks, waits for the release, then stops
the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moediag import protocol
from moediag.ranks import agent, entry

WAIT = "import signal; print(1, flush=True); signal.pause()"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT[15:]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def spawn(processes: list[subprocess.Popen[bytes]], code: str) -> int:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    processes.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / protocol.AGENT_EVENTS).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "t"} for line in lines]


def ended(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_an_end_is_reported_once_and_not_reaped(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    pid = spawn(processes, "raise SystemExit(3)")
    ended(pid)
    observer = agent.Observer(tmp_path)
    assert observer.look({4: pid})
    assert observer.look({4: pid})
    assert events(tmp_path) == [{"e": "exit", "rank": 4, "code": 3, "signal": None, "by_us": False}]
    assert processes[0].wait() == 3


def test_a_successful_end_does_not_hold_the_agent(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    pid = spawn(processes, "")
    ended(pid)
    observer = agent.Observer(tmp_path)
    assert not observer.look({0: pid})
    observer.reaped({0: 0})
    assert len(events(tmp_path)) == 1


def test_a_rank_that_the_agent_reaped_first_is_reported(tmp_path: Path) -> None:
    """It ended between the observer's look and the agent's own."""
    observer = agent.Observer(tmp_path)
    observer.reaped({1: -signal.SIGKILL})
    assert observer.look({})
    assert events(tmp_path) == [
        {"e": "exit", "rank": 1, "code": None, "signal": "SIGKILL", "by_us": False}
    ]


def test_other_ranks_are_stopped_only_after_the_release(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "GRACES", tuple((sig, 0.3) for sig, _ in agent.GRACES))
    dead, waits, stubborn = (spawn(processes, c) for c in ("import os; os.abort()", WAIT, IGNORE))
    ended(dead)
    pids = {0: dead, 1: waits, 2: stubborn}
    observer = agent.Observer(tmp_path)
    assert observer.look(pids)
    assert [e["rank"] for e in events(tmp_path)] == [0]
    (tmp_path / protocol.RELEASE_FILE).touch()
    observer.hold(pids)
    told = {e["rank"]: (e["signal"], e["by_us"]) for e in events(tmp_path)}
    assert told == {0: ("SIGABRT", False), 1: ("SIGTERM", True), 2: ("SIGKILL", True)}


def test_a_pid_that_is_no_longer_a_child_is_not_signalled(tmp_path: Path) -> None:
    """The agent reaped its rank, and another process got the pid."""
    command = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        other = int(parent.stdout.readline())
        observer = agent.Observer(tmp_path)
        observer._send({0: other}, signal.SIGKILL)
        assert Path(f"/proc/{other}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        observer._send({0: parent.pid}, signal.SIGKILL)
        assert parent.wait(10) == -signal.SIGKILL
        os.kill(other, signal.SIGKILL)


def test_an_error_file_has_the_format_of_torch_elastic() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        content: Any = entry.error_content(error)
    assert content["message"]["message"] == "ValueError: wrong"
    extra = content["message"]["extraInfo"]
    assert "raise ValueError" in extra["py_callstack"]
    assert int(extra["timestamp"]) == int(extra["time"])
