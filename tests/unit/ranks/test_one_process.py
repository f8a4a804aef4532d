"""When a program without a process group is recorded."""

from __future__ import annotations

import os
import sys
import types

import pytest

from moediag import protocol
from moediag.ranks.inject import one_process

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each start so far."""
    for name in (*LAUNCHERS, protocol.ENV_RANK_PID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(protocol.ENV_LAWS, "0")
    return []


def construct(starts: list[str]) -> None:
    class Optimizer:
        def __init__(self, rate: float) -> None:
            self.rate = rate

    one_process.expect(Optimizer, lambda: starts.append("started"))
    assert [Optimizer(rate).rate for rate in (1.0, 2.0)] == [1.0, 2.0]


def test_the_first_optimizer_starts_it_once(starts: list[str]) -> None:
    construct(starts)
    assert starts == ["started"]


def test_a_launcher_may_start_one_rank(starts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(protocol.ENV_RANK_PID, str(os.getpid()))
    construct(starts)
    assert starts == ["started"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (protocol.ENV_LAWS, None),  # without laws there is nothing to record
        (protocol.ENV_RANK_PID, "1"),  # a child of a rank
        ("WORLD_SIZE", "2"),
        ("RANK", "0"),
        ("SLURM_PROCID", "1"),
        ("OMPI_COMM_WORLD_RANK", "0"),
    ],
)
def test_processes_that_may_have_peers_and_children_are_left_alone(
    starts: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    construct(starts)
    assert not starts


def test_children_of_multiprocessing_are_left_alone(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = types.SimpleNamespace(parent_process=lambda: "the program")
    monkeypatch.setitem(sys.modules, "multiprocessing.process", process)
    construct(starts)
    assert not starts
