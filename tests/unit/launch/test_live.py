"""What `moediag top` shows of the ranks of a running job."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moediag.cli.top import rows, table
from moediag.launch.attach import spy
from moediag.launch.attach.live import Live, Now
from moediag.launch.attach.looking import Target
from moediag.launch.attach.proc import Proc
from moediag.launch.processes import Process
from tests.unit.launch.test_attach_looking import OUTSIDE, WAIT

WAITS = Now(0, "waits in all_reduce", "train.py:12 main", 40.0, 0.01, 2_000_000_000, "3")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    program = "import sys; print(flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        while (seen := Proc().seen(started.pid)) is None or seen.state != "S":
            pass
        yield started
        started.kill()


def test_one_rank_from_look_to_look(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[object] = []
    found = {"dump": WAIT}

    def dump(*_: object, **more: object) -> spy.Dump:
        options.append(more)
        return spy.Dump(found["dump"])

    monkeypatch.setattr(spy, "dump", dump)
    live = Live([Target(4, Process.of(process.pid))])
    (first,) = live.look()
    assert (first.rank, first.does, first.line) == (4, "waits in all_reduce", "train.py:12 main")
    assert (first.step, first.cpu) == ("3", None)
    assert first.memory > 0
    (again,) = live.look()  # its thread has not run, so its stack is not read again
    assert again.does == first.does and again.cpu is not None
    assert options == [{"pause": False}]
    found["dump"] = OUTSIDE
    assert Live([Target(4, Process.of(process.pid))]).look()[0].does == "sleeps"
    process.send_signal(signal.SIGSTOP)
    while live.proc.seen(process.pid).state != "T":  # type: ignore[union-attr]
        pass
    assert live.look()[0].does == "stopped"
    process.kill()
    process.wait()
    assert live.look()[0].does == "gone"


def test_a_rank_that_cannot_be_read(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spy, "dump", lambda *_, **__: spy.Dump(lost=spy.REFUSED))
    (now,) = Live([Target(0, Process.of(process.pid))]).look()
    assert (now.does, now.line) == ("sleeps", "(ptrace refused)")


def test_many_ranks_that_do_the_same_are_one_row() -> None:
    few = [Now(r, WAITS.does, WAITS.line) for r in range(3)]
    assert [row[0] for row in rows(few)] == ["0", "1", "2"]
    many = [Now(r, WAITS.does, WAITS.line, 40.0 + r, 0.0, 1, "3") for r in range(40)]
    many[3] = replace(many[3], gpu=0.7)
    many[7] = Now(7, "computes", "train.py:20 main", 0.0, 0.98, 2_000_000_000, "2")
    waits = ("waits in all_reduce", "train.py:12 main", "40 s", "0%", "70%", "0.00 GB", "3")
    assert rows(many) == [
        ("0..6, 8..39", *waits),
        ("7", "computes", "train.py:20 main", "", "98%", "", "2.00 GB", "2"),
    ]
    assert "GPU" in [column.header for column in table(many, "").columns]
    assert "GPU" not in [column.header for column in table(few, "").columns]
