"""Captures of a stuck process, and notes about missing ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag import protocol
from moediag.launch.capture import collect as module
from moediag.launch.capture import py_spy
from moediag.launch.capture.collect import capture
from moediag.launch.capture.py_spy import (
    blocked_frames,
    in_collective,
    joins,
    python_frames,
    reason,
)
from moediag.launch.processes import Process

VICTIM = """
import faulthandler, signal, sys
out = open(sys.argv[1], "w")
faulthandler.register(signal.SIGUSR1, file=out)
def stuck_here():
    print("ready", flush=True)
    while True:
        signal.pause()
stuck_here()
"""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    # A child may always be traced by its parent's other children unless Yama forbids it.
    stacks = str(tmp_path / protocol.stacks_file(0))
    process = subprocess.Popen([sys.executable, "-c", VICTIM, stacks], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_missing_captures_are_noted_and_the_rest_is_kept(
    victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(80)))
    done = capture(tmp_path, {0: Process.of(victim.pid)}, 30.0)
    assert done.seconds > 0
    folder = tmp_path / "capture"
    assert "State:" in (folder / "rank-0.proc.txt").read_text()
    tail = (folder / "rank-0.tail.txt").read_text().splitlines()
    assert (tail[0], tail[-1]) == ("line 30", "line 79")
    assert "rank 0: Flight Recorder (no recorder in this rank)" in done.not_seen
    if any("Python frames" in line for line in done.not_seen):
        assert not (folder / "rank-0.pyspy.json").exists()
    else:
        assert "stuck_here" in (folder / "rank-0.pyspy.json").read_text()


def test_without_tools_faulthandler_is_used(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "find_tool", lambda _: None)
    done = capture(tmp_path, {0: Process.of(victim.pid)}, 30.0)
    assert "rank 0: Python frames by py-spy (py-spy missing)" in done.not_seen
    assert "rank 0: native frames by pystack (pystack missing)" in done.not_seen
    assert not any("faulthandler" in line for line in done.not_seen)
    stacks = tmp_path / protocol.stacks_file(0)
    while "stuck_here" not in stacks.read_text():  # bounded by the test's timeout
        time.sleep(0.01)
    assert victim.poll() is None


def test_a_process_that_the_signal_would_kill_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "find_tool", lambda _: None)
    with subprocess.Popen(["sleep", "1000"]) as process:
        done = capture(tmp_path, {0: Process.of(process.pid)}, 5.0)
        assert process.poll() is None
        process.kill()
    assert any("faulthandler cannot be asked" in line for line in done.not_seen)


def test_a_tool_that_fails_or_hangs_is_reported(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\necho 'Permission denied (os error 13)' >&2\nexit 1\n")
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")
    for tool in (refuses, hangs):
        tool.chmod(0o755)
    tools = {"py-spy": str(refuses), "pystack": str(hangs)}
    monkeypatch.setattr(py_spy, "find_tool", tools.get)
    done = capture(tmp_path, {0: Process.of(victim.pid)}, 0.5)
    assert "rank 0: Python frames by py-spy (py-spy: ptrace refused)" in done.not_seen
    assert "rank 0: native frames by pystack (pystack took too long)" in done.not_seen


def test_an_ended_process_is_noted(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    done = capture(tmp_path, {3: Process.of(process.pid)}, 5.0)
    assert any(line.startswith("rank 3: whatever was not read") for line in done.not_seen)


def test_the_flight_recorder_is_requested_if_there_is_a_recorder(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "find_tool", lambda _: None)
    (tmp_path / protocol.heartbeat_file(0)).write_bytes(b"")
    silent = capture(tmp_path, {0: Process.of(victim.pid)}, 0.2)
    assert "rank 0: Flight Recorder (the rank did not answer)" in silent.not_seen
    assert (tmp_path / protocol.dump_request_file(0)).exists()
    (tmp_path / protocol.flight_file(0)).write_text("{}")
    answered = capture(tmp_path, {0: Process.of(victim.pid)}, 0.2)
    assert not any("Flight Recorder" in line for line in answered.not_seen)


def dump(*files: str, thread: str = "MainThread") -> bytes:
    frames = [{"name": "f", "filename": file, "line": 1} for file in files]
    return json.dumps([{"thread_name": thread, "frames": frames}]).encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (dump("/x/torch/distributed/distributed_c10d.py", "/x/train.py"), True),
        (dump("/x/torch/utils/data/dataloader.py", "/x/train.py"), False),
        (dump("<frozen importlib._bootstrap>", "/x/torch/distributed/fsdp/a.py"), False),
        (dump("/x/torch/distributed/elastic/agent.py"), False),
        (dump("/x/torch/distributed/c10d.py", thread="Thread-1"), False),
        (dump(*["/x/user.py"] * 9, "/x/torch/distributed/run.py"), False),
        (b"[]", False),
        (
            dump("/x/torch/distributed/c10d.py").replace(b'"f"', b'"init_process_group"'),
            False,
        ),
    ],
)
def test_a_collective_on_the_stack_is_recognised(raw: bytes, expected: bool) -> None:
    assert in_collective(raw) is expected


def test_a_rank_that_joins_the_others_sleeps_in_init_process_group() -> None:
    joining = dump("/x/torch/distributed/c10d.py", "/x/train.py")
    assert not joins(joining)
    joining = joining.replace(b'"f"', b'"init_process_group"', 1)
    assert joins(joining)
    assert not joins(joining.replace(b'"frames"', b'"active": true, "frames"'))
    assert not joins(b"[]")


ENGINE = "/x/torch/autograd/graph.py"


def native(*names: str, active: bool = False, file: str = ENGINE) -> bytes:
    """A main thread with native frames called ``names`` below Python's innermost one."""
    frames = [
        {"name": n, "filename": "libtorch_cpu.so", "module": "libtorch_cpu.so"} for n in names
    ]
    frames.append({"name": "_engine_run_backward", "filename": file})
    return json.dumps([{"thread_name": "MainThread", "active": active, "frames": frames}]).encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (native("pthread_cond_wait", "c10d::Reducer::finalize_backward"), True),
        (native("pthread_cond_wait", "gloo::transport::tcp::UnboundBuffer::waitRecv"), True),
        (native("pthread_cond_wait", "torch::autograd::Engine::thread_main"), False),
        (native("mkl_blas_sgemm", "torch::autograd::Engine::thread_main", active=True), False),
        # The reducer computes, too: it copies gradients into its buckets.
        (native("memcpy", "c10d::Reducer::mark_variable_ready", active=True), False),
        (native(), False),
        # The user's own C++ below Python code of the user.
        (native("read", "my_loader::next", file="/x/train.py"), False),
    ],
)
def test_native_frames_show_a_wait_below_autograd(raw: bytes, expected: bool) -> None:
    assert in_collective(raw) is expected


def test_a_checkpoint_is_no_wait_until_it_communicates() -> None:
    writer = "/x/torch/distributed/checkpoint/filesystem.py"
    assert not in_collective(dump(writer, "/x/train.py"))
    assert in_collective(dump("/x/torch/distributed/distributed_c10d.py", writer))


def test_native_frames_are_read_only_below_autograd(
    victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    answers: dict[bool, bytes | None] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        answer = answers["--native" in command]
        if answer is None:
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(py_spy, "find_tool", lambda _: "py-spy")
    monkeypatch.setattr(py_spy.subprocess, "run", run)
    ranks = {0: Process.of(victim.pid)}
    answers[False] = dump("/x/train.py")
    assert python_frames(ranks, 1.0) == {0: answers[False]} and len(asked) == 1
    answers |= {False: dump(ENGINE), True: native("c10d::Reducer::finalize_backward")}
    assert python_frames(ranks, 1.0) == {0: answers[True]} and len(asked) == 3
    assert blocked_frames(ranks, 1.0) == [0]
    answers[True] = None  # native frames take too long
    assert python_frames(ranks, 1.0) == {0: answers[False]}


COLLECTIVE = "/x/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("raw", "driver", "tools"),
    [
        (dump(COLLECTIVE, "/x/train.py"), False, ["py-spy --json"]),
        # It may wait for its device, whose state only native frames show.
        (dump(COLLECTIVE, "/x/train.py"), True, ["py-spy --json", "py-spy --native"]),
        (
            dump(COLLECTIVE, "/x/train.py").replace(b'"frames"', b'"owns_gil": true, "frames"'),
            False,
            ["py-spy --json", "py-spy --native"],
        ),
        (dump("/x/train.py"), False, ["py-spy --json", "py-spy --native"]),
        (dump(ENGINE, "/x/train.py"), False, ["py-spy --json", "py-spy --native"]),
        (None, False, ["py-spy --json", "pystack"]),
    ],
)
def test_native_frames_are_collected_where_python_does_not_explain_the_wait(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    raw: bytes | None, driver: bool, tools: list[str],
) -> None:  # fmt: skip
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        kind = next((f" {x}" for x in ("--native", "--json") if x in command), "")
        asked.append(command[0] + kind * (command[0] == "py-spy"))
        answer = raw if raw is not None else b""
        return subprocess.CompletedProcess(command, 0 if answer else 1, answer, b"no")

    # Every process maps its C library, so it stands for a driver here.
    monkeypatch.setattr(module, "_DRIVERS", ("/libc.so",) if driver else ("/libcuda.so",))
    monkeypatch.setattr(py_spy, "find_tool", lambda name: name)
    monkeypatch.setattr(py_spy.subprocess, "run", run)
    capture(tmp_path, {0: Process.of(victim.pid)}, 30.0)
    assert asked == tools


def test_reasons_are_readable() -> None:
    assert reason(b"Error: Operation not permitted (os error 1)\n") == "ptrace refused"
    assert reason(b"a\nlast line\n") == "last line"
    assert reason(b"") == "no output"


def test_tools_beside_the_interpreter_are_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "py-spy"
    beside.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert py_spy.find_tool("py-spy") == str(beside)
    monkeypatch.setenv("PATH", os.devnull)
    assert py_spy.find_tool("pystack") is None
