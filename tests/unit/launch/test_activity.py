"""What two looks at a process say that it does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moediag.launch.capture.activity import STUCK, Activity, look, work
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


WAIT = "import multiprocessing, os, queue, socket, sys, threading, time\n"
OTHER = "threading.Thread(target={}, daemon=True).start()\n"
LAST = "lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()"
POLLS = "\nwhile True:\n    try: queue.Queue().get(timeout=0.05)\n    except queue.Empty: pass\n"


@pytest.mark.parametrize(
    ("program", "stuck"),
    [
        (LAST, True),
        ("print(flush=True); queue.Queue().get()", True),
        ("lock = multiprocessing.Lock(); lock.acquire(); print(flush=True); lock.acquire()", True),
        (OTHER.format("lambda: queue.Queue().get(timeout=99)") + LAST, True),
        # These may continue, or another thread may release the lock.
        ("print(flush=True); time.sleep(99)", False),
        ("pair = socket.socketpair(); print(flush=True); pair[0].recv(1)", False),
        ("print(flush=True)" + POLLS, False),
        ("print(flush=True); queue.Queue().get(timeout=99)", False),
        (OTHER.format("lambda: time.sleep(99)") + LAST, False),
        (OTHER.format("lambda: os.read(os.pipe()[0], 1)") + LAST, False),
    ],
)  # fmt: skip
def test_a_process_that_waits_for_a_lock_that_nothing_will_release(
    program: str, stuck: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT + program], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        while not all(asleep(process.pid, one) for one in threads):
            assert process.poll() is None
        time.sleep(0.2)  # one that is not there yet may wait for the interpreter
        looks = [look(Process.of(process.pid), now, None, threads) for now in (0.0, 10.0)]
        unknown = [look(Process.of(process.pid), now) for now in (0.0, 10.0)]
        process.kill()
    before, after = (one for one in looks if one is not None)
    if stuck and not before.lock:
        pytest.skip("this kernel does not tell system calls")
    assert work(before, after) == (STUCK if stuck else "")
    assert work(before, replace(after, children=after.children + 0.01)) == ""
    assert work(before, replace(after, woken=before.woken + 50)) == ""
    assert work(*(one for one in unknown if one is not None)) == ""


def asleep(pid: int, thread: int) -> bool:
    return "State:\tS" in Path(f"/proc/{pid}/task/{thread}/status").read_text()


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
