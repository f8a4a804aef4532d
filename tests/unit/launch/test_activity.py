"""What two looks at a process say that it does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moediag.launch.capture.activity import Activity, look, work
from moediag.launch.processes import NEVER, Process

SAVED, LOG = ("/run/model.pt", True), ("/run/train.log", True)


def seen(at: float, offsets: Mapping[tuple[str, bool], int], **more: Any) -> Activity:
    return replace(Activity(at, offsets, busiest="nvcc"), **more)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (seen(0, {SAVED: 0}), seen(10, {SAVED: 4_000_000}), "writes model.pt at 0.4 MB/s"),
        (
            seen(0, {("/run/model.pt", False): 0}),
            seen(10, {("/run/model.pt", False): 10**9}),
            "reads model.pt at 100.0 MB/s",
        ),
        (
            seen(0, {}, storage=0), seen(10, {}, storage=50_000_000),
            "reads or writes at 5.0 MB/s",
        ),
        (seen(0, {}, calls=0), seen(10, {}, calls=2_000_000), "reads or writes at 0.2 MB/s"),
        (
            seen(0, {}, connections={7: (10**6, 10**6)}),
            seen(10, {}, connections={7: (10**6, 4 * 10**6), 8: (0, 10**6)}),
            "receives over the network at 0.4 MB/s",
        ),
        (
            seen(0, {}), seen(10, {}, connections={7: (10**7, 2000)}),
            "sends over the network at 1.0 MB/s",
        ),
        (seen(0, {}), seen(10, {}, connections={7: (5000, 2000)}), ""),  # asks a store now and then
        (
            seen(0, {}, children=1.0), seen(10, {}, children=9.0, busiest=""),
            "waits for child processes, which work",
        ),
        (
            seen(0, {}, children=1.0), seen(10, {}, children=9.0),
            "waits for the child process nvcc, which works",
        ),
        (seen(0, {LOG: 0}), seen(10, {LOG: 5_000}), ""),  # a rank that prints while it waits
        (seen(0, {}, children=1.0), seen(10, {}, children=1.5), ""),  # a monitoring process
        (  # a busy machine
            seen(0, {}, children=1.0, wants_cpu=True), seen(10, {}, children=1.5, wants_cpu=True),
            "waits for the child process nvcc, which works",
        ),
        (seen(0, {}, wants_cpu=True), seen(10, {}, children=0.5), ""),
        (seen(0, {}), seen(10, {SAVED: 10**9}), ""),  # opened in between
        (seen(10, {SAVED: 0}), seen(10, {SAVED: 10**9}), ""),
    ],
)  # fmt: skip
def test_two_looks_say_what_a_process_does(before: Activity, after: Activity, words: str) -> None:
    assert work(before, after) == words


@pytest.mark.parametrize(("cpu", "works"), [(0.5, True), (0.1, False)])
def test_a_child_that_is_waited_for_works_on_little_cpu_time(cpu: float, works: bool) -> None:
    looks = seen(0, {}, children=1.0), seen(10, {}, children=1.0 + cpu)
    assert bool(work(*looks, waited_for=True)) == works
    assert not work(*looks)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes a megabyte whenever it is asked to."""
    program = (
        "import sys\nfile = open(sys.argv[1], 'wb', buffering=0)\n"
        "for _ in sys.stdin:\n    file.write(bytes(10**6)); print('done', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "model.pt")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_a_real_process_that_writes(writer: subprocess.Popen[bytes]) -> None:
    assert writer.stdin is not None and writer.stdout is not None
    looks = []
    for now in (0.0, 2.0):
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        writer.stdout.readline()
        found = look(Process.of(writer.pid), now)
        assert found is not None
        looks.append(found)
    assert work(*looks) == "writes model.pt at 0.5 MB/s"


def test_the_work_of_a_child_is_that_of_its_parent(writer: subprocess.Popen[bytes]) -> None:
    assert writer.stdin is not None and writer.stdout is not None
    before = look(Process.of(os.getpid()), 0.0)
    writer.stdin.write(b"\n")
    writer.stdin.flush()
    writer.stdout.readline()
    after = look(Process.of(os.getpid()), 2.0)
    assert before is not None and after is not None
    assert ("model.pt", True) in {(Path(path).name, writes) for path, writes in after.offsets}
    assert after.calls - before.calls >= 10**6


def test_what_a_connection_carried_is_known_from_the_kernel() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        before = look(Process.of(os.getpid()), 0.0)
        one.sendall(bytes(10_000))
        other.recv(10_000, socket.MSG_WAITALL)
        after = look(Process.of(os.getpid()), 1.0)
    assert before is not None and after is not None
    if not before.connections:
        pytest.skip("this kernel does not tell the bytes of a connection")
    (received,) = [
        into - before.connections[one][1]
        for one, (_, into) in after.connections.items()
        if into > before.connections.get(one, (0, 0))[1]
    ]
    assert received == 10_000


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    assert look(Process(os.getpid(), NEVER), 0.0) is None
