"""A process that spins in a function called cudaStreamSynchronize, seen with the real tools. The
library is a stand-in of a few lines of C; what is read from the process is real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag.evidence.rank_stacks import on_the_device, parse_pystack
from moediag.launch.capture.py_spy import find_tool, on_device, python_frames
from moediag.launch.processes import Process
from tests.unit.cuda_stand_in import build

VICTIM = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
def step():
    print("ready", flush=True)
    getattr(library, sys.argv[2])(None)
step()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(params=["cudaStreamSynchronize", "compute"])
def rank(library: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """Returns a pid and whether it waits for its device."""
    command = [sys.executable, "-c", VICTIM, str(library), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid, request.param != "compute"
        process.kill()


def test_py_spy_shows_whether_a_rank_waits_for_its_device(rank: tuple[int, bool]) -> None:
    pid, waits = rank
    found = python_frames({0: Process.of(pid)}, 60.0, native=True)
    if not found:
        pytest.skip("py-spy cannot read this process (ptrace)")
    assert b"step" in found[0]
    assert on_device(found[0]) == waits


def test_pystack_shows_whether_a_rank_waits_for_its_device(rank: tuple[int, bool]) -> None:
    pid, waits = rank
    tool = find_tool("pystack")
    if tool is None:
        pytest.skip("there is no pystack")
    command = [tool, "remote", "--no-color", "--native", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    stacks = parse_pystack(done.stdout)
    if not stacks:
        pytest.skip(f"pystack cannot read this process: {done.stderr[-200:]}")
    assert any(frame.function == "step" for frame in stacks[0].frames)
    assert any(map(on_the_device, stacks)) == waits


def thread(name: str, *frames: tuple[str, str]) -> dict[str, object]:
    """As py-spy prints one, innermost frame first."""
    return {"thread_name": name, "frames": [{"name": n, "filename": f} for n, f in frames]}


BACKWARD = thread(
    "MainThread",
    ("pthread_cond_wait", "/lib/libc.so.6"),
    ("torch::autograd::Engine::execute", "/torch/lib/libtorch_cpu.so"),
    ("_engine_run_backward", "/site-packages/torch/autograd/graph.py"),
    ("train", "train.py"),
)
FORWARD = thread("MainThread", ("forward", "train.py"))
HOOK = ("post_backward", "/site-packages/torch/distributed/fsdp/_fsdp_param_group.py")
SYNC = ("cudaStreamSynchronize", "/libcudart.so.13")


@pytest.mark.parametrize(
    ("main", "other", "waits"),
    [
        (BACKWARD, thread("Thread-1", SYNC, HOOK), True),
        (BACKWARD, thread("Thread-1", ("ncclGroupEnd", "/libnccl.so.2"), HOOK), True),
        (BACKWARD, thread("Thread-1", ("at::native::add", "/libtorch.so"), HOOK), False),
        (BACKWARD, thread("loader", SYNC, ("_bootstrap", "/lib/threading.py")), False),
        (FORWARD, thread("Thread-1", SYNC, HOOK), False),
        (BACKWARD, thread("Thread-1"), False),
    ],
    ids=["on the device", "in NCCL", "computes", "the program's own", "not awaited", "no frames"],
)
def test_autograds_thread_waits_for_the_device_in_a_backward(
    main: dict[str, object], other: dict[str, object], waits: bool
) -> None:
    assert on_device(json.dumps([main, other]).encode()) == waits
