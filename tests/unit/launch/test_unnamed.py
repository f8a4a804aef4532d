"""Ranks that have not named themselves, among real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from moediag.launch.processes import Process, all_stats
from moediag.launch.unnamed import unnamed

Start = Callable[..., Process]
READY = "print('ready', flush=True); import sys; sys.stdin.read()"
# A parent whose child inherits its environment, as a worker of a data loader does.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


EARLIER: set[int] = set()  # processes that other tests left running below this one


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process with some variables; it is ready once this returns."""
    EARLIER.update(all_stats())
    plain = {name: value for name, value in os.environ.items() if "RANK" not in name}
    with ExitStack() as ends:

        def begin(*arguments: str, **variables: str) -> Process:
            process = subprocess.Popen(
                [sys.executable, "-c", *(arguments or (READY,))], env=plain | variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            ends.enter_context(process)
            assert process.stdin is not None and process.stdout is not None
            ends.callback(process.stdin.close)
            assert process.stdout.readline() == b"ready\n"
            return Process.of(process.pid)

        yield begin
    EARLIER.clear()


def found(known: dict[int, Process], *ranks: int) -> dict[int, Process]:
    stats = all_stats()
    own = [s for s in stats.values() if s.pid not in EARLIER and _below(s.pid, stats)]
    return unnamed(own, known, ranks)


def _below(pid: int, stats: dict[int, object]) -> bool:
    while pid in stats and pid != os.getpid():
        pid = stats[pid].ppid  # type: ignore[attr-defined]
    return pid == os.getpid()


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_a_rank_is_known_by_its_environment(start: Start, name: str) -> None:
    one = start(**{name: "1"})
    assert found({}, 0, 1) == {1: one}


def test_a_local_rank_counts_as_those_of_known_ranks_do(start: Start) -> None:
    known, one = start(LOCAL_RANK="0"), start(LOCAL_RANK="1")
    assert found({4: known}, 5) == {5: one}
    assert found({}, 1) == {}  # which rank it is, nothing shows
    assert found({0: start(), 4: known}, 1, 5) == {}


def test_an_agent_under_slurm_is_no_rank(start: Start) -> None:
    agent, one = start(SLURM_PROCID="0"), start(SLURM_PROCID="0", RANK="1")
    assert found({}, 0) == {}
    assert found({}, 0, 1) == {1: one}
    assert agent != one


def test_the_first_rank_may_start_the_others(start: Start) -> None:
    """As in Lightning: only the ranks that it starts get a LOCAL_RANK."""
    script = f"import os; os.environ['LOCAL_RANK'] = '1'; {PARENT}"
    first = start(script, READY)
    (one,) = found({0: first}, 1).values()
    stats = all_stats()
    assert stats[one.pid].ppid == first.pid


@pytest.mark.parametrize("others", [0, 1])
def test_spawned_ranks_are_known_by_their_order(start: Start, others: int) -> None:
    """``others``: children of the same parent that are no ranks."""
    every = [start() for _ in range(4)]
    (*_, tracker) = (start() for _ in range(others)) if others else (None,)
    known = {rank: every[rank] for rank in (0, 1, 3)}
    assert found(known, 2) == ({} if tracker else {2: every[2]})
    assert found({5: every[1], 7: every[3]}, *range(4), 4, 6) == (
        {} if tracker else {4: every[0], 6: every[2]}
    )
    assert found({1: every[0], 0: every[1]}, 2, 3) == {}  # not in the order of their ranks
    assert found({}, 0, 1, 2, 3) == {}


def test_a_child_of_a_rank_is_none(start: Start) -> None:
    parent = start(PARENT, READY, RANK="1")
    assert found({}, 1) == {1: parent}
    assert found({1: parent}, 2) == {}
    assert found({0: parent}, 1) == {}  # the child of a known rank
