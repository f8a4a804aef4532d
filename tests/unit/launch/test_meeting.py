"""The name of a job, from the store of its ranks."""

from __future__ import annotations

import sys

import pytest
from torch.distributed import HashStore, PrefixStore

from moediag import protocol
from moediag.ranks import job_token


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (protocol.ENV_JOB, "GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)


def test_all_clients_of_a_store_get_the_same_name() -> None:
    store = HashStore()
    found = job_token.job(store)
    assert found is not None
    assert job_token.job(store) == found
    assert found["python"] == sys.executable
    assert found["store"] is None  # no address for other processes
    assert found["node"] is None
    other = job_token.job(HashStore())
    assert other is not None
    assert other["job"] != found["job"]


def test_each_rendezvous_of_agents_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = (job_token.token(PrefixStore(f"round.{n}", store)) for n in range(2))
    assert first != second
    monkeypatch.setenv(protocol.ENV_JOB, second)
    monkeypatch.setenv("GROUP_RANK", "3")
    found = job_token.job(None)
    assert found is not None
    assert (found["job"], found["node"]) == (second, 3)


def test_without_a_store_there_is_no_name() -> None:
    assert job_token.job(None) is None
