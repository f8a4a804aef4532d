"""The gate that holds forked ranks until the last one is forked."""

from __future__ import annotations

import os
import time

from moediag.ranks.host import Gate


def passing(gate: Gate) -> tuple[int, int]:
    """A forked child that writes when it passed the gate: its pid and the pipe."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        gate.wait()
        os.write(into, str(time.monotonic_ns()).encode())
        os._exit(0)
    os.close(into)
    return pid, out


def code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_rank_starts_before_all_are_forked() -> None:
    gate = Gate(3)
    children = [passing(gate) for _ in range(3)]
    opened = time.monotonic_ns()
    gate.open()
    assert all(int(os.read(out, 32)) > opened for _, out in children)
    assert [code(pid) for pid, _ in children] == [0, 0, 0]


def test_a_rank_ends_with_the_process_that_forked_it() -> None:
    gate = Gate(1)
    pid, out = passing(gate)
    os.close(gate._in)
    assert os.read(out, 16) == b""
    assert code(pid) == 1
