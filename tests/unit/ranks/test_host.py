"""What the host of forked ranks adds to torch's elastic agent: a gate, and names of events."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from moediag.lab.ranks import host
from moediag.lab.ranks.host import Gate


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


def test_events_of_a_rendezvous_have_the_names_that_torch_gives_them() -> None:
    def named() -> tuple[str, str]:
        return dynamic_rendezvous.get_method_name(), host._caller()

    def joins() -> tuple[str, str]:
        return named()

    assert joins() == ("joins", "joins")


def test_only_the_random_delay_of_the_first_rendezvous_is_removed() -> None:
    # torch's own module, in which a later release may name or call it differently.
    code_of_first = dynamic_rendezvous.DynamicRendezvousHandler.next_rendezvous.__code__
    assert "_delay" in code_of_first.co_names and (0, 0.3) in code_of_first.co_consts
    waited: list[object] = []
    torchs = SimpleNamespace(_delay=waited.append)
    host._join_at_once(torchs)
    torchs._delay(seconds=(0, 0.3))
    torchs._delay(seconds=1)
    assert waited == [1]
    host._join_at_once(SimpleNamespace())  # a release without it
